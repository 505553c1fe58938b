"""Changes the text of modules as they are imported, as CHAOS_CHANGES says: a JSON list of [module, old, new].

The interpreter imports this first where a test has put this folder on PYTHONPATH, and nowhere else. The product knows
nothing of it.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import CodeType, ModuleType


class _ChangedLoader(importlib.machinery.SourceFileLoader):
    """Compiles the changed source; what Python has cached of the true one is not looked at."""

    changes: Sequence[tuple[str, str]] = ()

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_source(fullname) or ""
        for old, new in self.changes:
            if source.count(old) != 1:
                raise ImportError(f"{fullname} has this text {source.count(old)} times: {old}")
            source = source.replace(old, new)
        return compile(source, self.path, "exec", dont_inherit=True)


class _Changer(MetaPathFinder):
    def __init__(self, changes: Sequence[tuple[str, str, str]]) -> None:
        self._changes = changes

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        changes = [(old, new) for module, old, new in self._changes if module == fullname]
        if not changes:
            return None
        specs = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.origin is None:
            raise ImportError(f"there is no source of {fullname} to change")
        loader = _ChangedLoader(fullname, spec.origin)
        loader.changes = changes
        spec.loader = loader
        return spec


if os.environ.get("CHAOS_CHANGES"):
    sys.meta_path.insert(0, _Changer(json.loads(os.environ["CHAOS_CHANGES"])))
