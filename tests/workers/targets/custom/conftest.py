"""Targets without a process of their own, for what needs none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workers.targets.custom.samples import ProcessStandIn


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Targets are opened in the process of the test; the modules of its folder are forgotten afterwards."""
    monkeypatch.setattr("bexp.workers.targets.custom.target.TargetProcess", ProcessStandIn)
    monkeypatch.setattr("bexp.targets.process._limit_memory", lambda *_: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name, module in list(sys.modules.items()):
        if tmp_path in Path(getattr(module, "__file__", None) or "/").parents:
            del sys.modules[name]
