"""Loading of a target by its name: a file with a class in it, or a registered module."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

METHODS = ("build", "batch", "step")
MOST_NAMED = 10
"""The most classes of a module that a message names."""


class TargetError(Exception):
    """A target that cannot be used as one; the message says why."""


def load_target(reference: str) -> Any:
    """Return the target that `reference` names: `/path/train.py:Target` or `package.module:Target`.

    A class is called without arguments. The folder of a file is the first that imports are looked up in, as when the
    file is run.

    Raises:
        TargetError: there is no such file, module or name in it, or it lacks a method.
        Exception: whatever the import raises.
    """
    place, _, name = reference.rpartition(":")
    module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    named: Any = module
    for part in name.split("."):
        named = getattr(named, part, None)
        if named is None:
            raise TargetError(f"{place} has no '{name}'{_classes_of(module)}")
    target = named() if isinstance(named, type) else named
    missing = [method for method in METHODS if not callable(getattr(target, method, None))]
    if missing:
        raise TargetError(f"'{name}' has no method {', '.join(missing)}")
    return target


def _classes_of(module: ModuleType) -> str:
    """The classes that a module defines itself, as an addition to a message."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    classes = [name for name in own if isinstance(vars(module)[name], type)]
    return f"; its classes are {', '.join(classes[:MOST_NAMED])}" if classes else ""


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TargetError(f"there is no file {path}")
    sys.path.insert(0, str(path.parent))
    name = path.stem if path.stem not in sys.modules else f"target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a file that ends with .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs, as an import does: dataclasses look their module up
    spec.loader.exec_module(module)
    return module
