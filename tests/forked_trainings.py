"""Training commands that have torch, accelerate and transformers when they begin, for tests of what comes after.

They are forked where `subprocess.Popen` would start the interpreter. A library that is there already is patched by the
hook of `bexp tune` when they begin, and the module of transformers' Trainer when they import it, as ever.
`tests/acceptance` starts real ones, and so does a test with an option of the interpreter before the script.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bexp.tune.environment import HOOK
from bexp.tune.imports import _Watcher
from tests.chaos.fork_server import ForkedProcess, shared_server
from tests.forked_ranks import ROOT

SCRIPTS = ROOT / "tests" / "tune_commands"
PRELOADED = (
    "bexp.tune.imports",
    "tests.forked_ranks",
    "accelerate",
    "transformers.integrations",
    "transformers.models.auto.modeling_auto",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.optimization",
    "transformers.processing_utils",
    "transformers.trainer_pt_utils",
    "transformers.training_args",
)


def start_training(command: Sequence[str], *, cwd: str, env: Mapping[str, str], **options: Any) -> Any:
    """Do what `subprocess.Popen` does with a training command; that of a script of ours is a fork."""
    if not any(Path(word).parent == SCRIPTS for word in command[1:2]):
        return subprocess.Popen(command, cwd=cwd, env=env, **options)
    read, write = os.pipe()
    try:
        given = json.dumps([command[1:], cwd, dict(env)])
        process: ForkedProcess = shared_server(*PRELOADED).start("tests.forked_trainings", given, output=write)
    finally:
        os.close(write)
    process.stdout = os.fdopen(read, "rb")
    return process


def _main(arguments: list[str], folder: str, environment: dict[str, str]) -> None:
    """Run a script as the interpreter does that is started in a folder with an environment."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = arguments
    paths = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:0] = [str(Path(arguments[0]).parent), *paths]
    runpy.run_path(str(HOOK / "sitecustomize.py"))
    for watcher in [finder for finder in sys.meta_path if isinstance(finder, _Watcher)]:
        for name in [name for name in watcher._patches if name in sys.modules]:
            watcher._patches.pop(name)(sys.modules[name])
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    _main(*json.loads(sys.argv[1]))
