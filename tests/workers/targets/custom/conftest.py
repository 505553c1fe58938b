"""Targets without a process of their own, and training commands that need not import torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.forked_ranks import HAS_GPUS
from tests.forked_trainings import start_training
from tests.workers.targets.custom.commands import Commands
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


@pytest.fixture
def forked_trainings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training commands have torch and transformers when they begin, unless this host has GPUs."""
    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "PIPE", "STDOUT", "TimeoutExpired")}
    if not HAS_GPUS:
        stand_in = SimpleNamespace(Popen=start_training, **names)
        monkeypatch.setattr("bexp.workers.targets.custom.command.subprocess", stand_in)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Commands]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made = Commands(tmp_path)
    yield made
    for process in made.started:
        process.end()
