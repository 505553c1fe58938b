"""What tests do to profiler processes in the middle of a trial, however fast or slow the host is."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from bexp.explorer.cost.components import ComponentKind
from bexp.workers.process import trial_run
from bexp.workers.process.child import ProfilerProcess
from bexp.workers.process.protocol import ComponentStarted, Reply

Act = Callable[[Callable[[], object]], None]


@pytest.fixture
def in_the_middle(monkeypatch: pytest.MonkeyPatch) -> Act:
    """Takes what to do once, as soon as a process has said that it begins with an attention."""
    acts: list[Callable[[], object]] = []
    receive = ProfilerProcess.receive

    def act_on_start(process: ProfilerProcess, timeout_seconds: float) -> Reply | None:
        reply = receive(process, timeout_seconds)
        if acts and isinstance(reply, ComponentStarted) and reply.component.kind is ComponentKind.ATTENTION:
            acts.pop()()
        return reply

    monkeypatch.setattr(ProfilerProcess, "receive", act_on_start)
    return acts.append


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets seconds pass for the deadlines of trials."""

    def forward(seconds: float) -> None:
        monkeypatch.setattr(trial_run, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + seconds))

    return forward
