"""The hook that every Python process of a tuned command loads, because this folder leads PYTHONPATH.

The hook makes `bexp.tune` importable after everything else, and runs the `sitecustomize` that it hides, if any.
"""

from __future__ import annotations

import os
import sys


def _run_hidden() -> None:
    """Run the next `sitecustomize` on the path, as if this one were not there."""
    here = os.path.dirname(os.path.abspath(__file__))
    path = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != here]
    sys.path[:] = path
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _arm() -> None:
    """Watch the imports of this process, if it belongs to a trial or runs with an answer."""
    site = os.environ.get("BEXP_TUNE_SITE")
    if site is None:
        return
    if site not in sys.path:
        sys.path.append(site)
    from bexp.tune.imports import arm

    arm()


_run_hidden()
try:
    _arm()
except Exception as error:  # the command runs on, and the trial says that nobody answered
    print(f"bexp: the hook cannot be loaded: {type(error).__name__}: {error}", file=sys.stderr)
