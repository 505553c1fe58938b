"""Runs scripts as commands with an answer, each in a process of its own that shares one import of the libraries.

    python -m tests.bexp.applied_scripts FOLDER

reads FOLDER/scripts.json, each name with a script and its environment, and writes NAME.out, NAME.err and NAME.code.
`tests/acceptance/test_tune.py` starts a whole command with the hook.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path

MODULES = ("torch.optim.optimizer", "accelerate.accelerator", "accelerate.utils.memory", "transformers.trainer")
"""What the scripts import, and the hook patches."""


def run(folder: Path, name: str, script: str, environment: dict[str, str]) -> int:
    """Be a command: patch what the hook would have patched, run the script, and end as Python does."""
    from bexp.tune import imports

    for number, ending in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{name}.{ending}", os.O_WRONLY | os.O_CREAT), number)
    os.environ |= environment
    os.chdir(folder)
    imports.arm()
    for module in MODULES:
        loaded = sys.modules.pop(module)
        spec = next(f for f in sys.meta_path if isinstance(f, imports._Watcher)).find_spec(module, _path_of(module))
        assert spec is not None
        assert isinstance(spec.loader, imports._Patching)
        sys.modules[module] = loaded
        spec.loader._patch(loaded)
    code = 0
    try:
        exec(compile(script, name, "exec"), {"__name__": "__main__"})
    except Exception:  # noqa: BLE001 - as an interpreter does at its end
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _path_of(module: str) -> list[str]:
    """Where the finders look for it: beside the other modules of its package."""
    return list(sys.modules[module.rpartition(".")[0]].__path__)


if __name__ == "__main__":
    where = Path(sys.argv[1])
    for each in MODULES:
        import_module(each)
    for key, (text, added) in json.loads((where / "scripts.json").read_text()).items():
        if (pid := os.fork()) == 0:
            os._exit(run(where, key, text, added))
        (where / f"{key}.code").write_text(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
