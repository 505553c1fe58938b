"""Training commands that have torch, accelerate and transformers when they begin, for tests of what comes after.

They are forked where `subprocess.Popen` would start the interpreter, as are the ranks of torchrun. A library that is
there already is patched by the hook of `bexp tune` when they begin, and the module of transformers' Trainer when they
import it, as ever. `tests/acceptance` starts real ones, and so does a test with `-u` before the script.
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

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from bexp.tune import clock
from bexp.tune.environment import HOOK
from bexp.tune.imports import _Watcher
from tests.chaos.fork_server import ForkedProcess, shared_server
from tests.forked_group import RankServer
from tests.forked_ranks import ROOT

SCRIPTS = ROOT / "tests" / "tune_commands"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
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
    words = command[6:7] if tuple(command[1:6]) == TORCHRUN else command[1:2]
    if not any(Path(word).parent == SCRIPTS for word in words):
        return subprocess.Popen(command, cwd=cwd, env=env, **options)
    read, write = os.pipe()
    try:
        given = json.dumps([command[1:], cwd, dict(env)])
        process: ForkedProcess = shared_server(*PRELOADED).start("tests.forked_trainings", given, output=write)
    finally:
        os.close(write)
    process.stdout = os.fdopen(read, "rb")
    return process


BRIEF = {"WARM_UP_SECONDS": 0.1, "LEAST_SECONDS": 0.2, "PRECISE_SECONDS": 0.6, "SETTLING_SECONDS": 1.0}
"""How long steps are timed, in place of the product's seconds: tests look at what is counted, not how precisely."""


class _Ranks(RankServer):
    """Forks the ranks of torchrun, which are scripts of ours."""

    def start_rank(self, command: Sequence[str], environment: Mapping[str, str]) -> object:
        given = json.dumps([command[2:], str(Path.cwd()), dict(environment)])  # after the interpreter and `-u`
        return self.start("tests.forked_trainings", given, output=sys.stdout.fileno())


def _main(arguments: list[str], folder: str, environment: dict[str, str]) -> None:
    """Run a script or torchrun as the interpreter does that is started in a folder with an environment."""
    os.chdir(folder)
    is_launcher = arguments[0] == TORCHRUN[0]
    if is_launcher:
        SubprocessHandler._popen = _Ranks().start_rank  # type: ignore[assignment]  # a double
        del arguments[0]
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = arguments
    paths = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:0] = [str(Path(arguments[0]).parent), *paths]
    runpy.run_path(str(HOOK / "sitecustomize.py"))
    for watcher in [finder for finder in sys.meta_path if isinstance(finder, _Watcher)]:
        for name in [name for name in watcher._patches if name in sys.modules]:
            watcher._patches.pop(name)(sys.modules[name])
    for name, seconds in BRIEF.items():
        setattr(clock, name, seconds)
    sys.tracebacklimit = 9  # a traceback is no longer for having been forked: only the last lines printed are kept
    if is_launcher:
        run.main()
    else:
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    _main(*json.loads(sys.argv[1]))
