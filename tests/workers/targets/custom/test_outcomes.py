"""What a target's own mistakes become: outcomes with their reason, and a clean next trial."""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from bexp.explorer.records.measurement import Outcome
from bexp.targets import process
from bexp.workers.instruments.failures import TargetKilledError, TrialFailedError, UnsupportedTrialError
from bexp.workers.targets.custom.process import last_output
from bexp.workers.targets.custom.target import CustomTarget
from tests.workers.targets.custom.samples import HARDWARE, PLAIN, ProcessStandIn, measure, open_custom, write

FAULTY = """
    import os, pathlib, time
    import torch
    from torch import nn

    class Target:
        def build(self, config, device):
            return nn.Linear(64, 64, device=device)

        def batch(self, micro_batch_size, device):
            self.fault = {3: "raise", 4: "nan", 7: "memory", 8: "reshape", 10: "hang"}.get(micro_batch_size, "kill")
            self.width = getattr(self, "width", 63) + (micro_batch_size == 9)
            return torch.randn(micro_batch_size, max(64, self.width), device=device)

        def step(self, model, batch):
            print("a step of", len(batch))
            if self.fault == "raise":
                raise ValueError("the data is corrupt")
            if self.fault == "memory":
                torch.ones(1 << 36)
            if self.fault == "hang":
                print("waiting for a lock", flush=True)
                time.sleep(600)
            if self.fault == "kill" and pathlib.Path("kill").exists():
                pathlib.Path("kill").unlink()
                os.kill(os.getpid(), 9)
            loss = model(batch).square().mean() * (float("nan") if self.fault == "nan" else 1.0)
            loss.backward()
            if self.fault == "reshape":
                model.weight = nn.Parameter(torch.randn(32, 64))
            return loss
"""


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("micro_batch_size", "reason"),
    [
        (3, r"ValueError: the data is corrupt \(train.py line 18\)"),
        (4, "the loss is not finite at micro-batch size 4"),
        (8, "changes the shapes of the model's parameters"),
        (9, r"batch\(9\) returns other shapes each time"),
    ],
)
def test_a_failed_step_is_an_outcome_and_the_next_trial_has_a_fresh_model(
    tmp_path: Path, micro_batch_size: int, reason: str
) -> None:
    target = open_custom(write(tmp_path, FAULTY))
    target.report(HARDWARE)
    with pytest.raises(TrialFailedError, match=reason) as caught:
        measure(target, micro_batch_size)
    assert caught.value.outcome is Outcome.CRASHED
    assert target._process is not None
    assert not target._process.alive
    assert measure(target, 2).backward_peak_bytes > 0


def kill_when_asked(
    monkeypatch: pytest.MonkeyPatch, left: list[str], clock: list[float], seconds: float = 0.0
) -> list[float]:
    """Kill processes at the commands in `left`, each after `seconds`. Returns the deadlines of all commands."""
    ask, deadlines = ProcessStandIn.ask, list[float]()

    def kill(process: ProcessStandIn, asked: str, timeout_seconds: float, **arguments: Any) -> dict[str, Any]:
        deadlines.append(timeout_seconds)
        if asked not in left:
            return ask(process, asked, timeout_seconds, **arguments)
        left.remove(asked)
        process.end()
        clock[0] += seconds
        raise TargetKilledError(Outcome.CRASHED, "the target's process was killed by SIGTERM")

    monkeypatch.setattr(ProcessStandIn, "ask", kill)
    monkeypatch.setattr("bexp.workers.targets.custom.target.time", Mock(monotonic=lambda: clock[0]))
    return deadlines


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("command", ["open", "describe"])
def test_what_somebody_kills_before_the_first_trial_is_started_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    left, clock = [command], [0.0]
    deadlines = kill_when_asked(monkeypatch, left, clock, seconds=60.0)
    target = open_custom(write(tmp_path, PLAIN), seconds=100.0)
    target.report(HARDWARE)
    assert (left, deadlines[-2:]) == ([], [90.0, 90.0]), "what is left of the time for all"
    left += [command] * 2
    with pytest.raises(UnsupportedTrialError, match=r"twice: .*killed by SIGTERM; .*memory: dmesg there says so"):
        target.report(HARDWARE)


@pytest.mark.usefixtures("in_process")
def test_what_is_killed_late_is_not_started_again_before_its_profiler_counts_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = ["describe"]
    deadlines = kill_when_asked(monkeypatch, left, [0.0], seconds=80.0)
    reason = "killed by SIGTERM, after 80 of the 150 s for importing and building, too late .*; .*dmesg"
    with pytest.raises(UnsupportedTrialError, match=reason):
        open_custom(write(tmp_path, PLAIN)).report(HARDWARE)
    assert len(deadlines) == 2


@pytest.mark.usefixtures("in_process")
def test_a_kill_in_a_trial_is_its_outcome_and_the_next_one_has_a_deadline_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    target = open_custom(write(tmp_path, PLAIN), seconds=100.0)
    deadlines = kill_when_asked(monkeypatch, ["measure"], clock, seconds=90.0)
    target.report(HARDWARE)
    with pytest.raises(TargetKilledError):
        measure(target, 2)
    assert measure(target, 2).backward_peak_bytes > 0
    assert deadlines[-2:] == [100.0, 100.0]


class SilentQueue(queue.SimpleQueue[bytes | None]):
    """Replies of which none comes in time. The time is over as soon as `is_hanging`."""

    def __init__(self, is_hanging: Callable[[], bool]) -> None:
        self._is_hanging = is_hanging

    def get(self, block: bool = True, timeout: float | None = None) -> bytes | None:
        assert timeout is not None
        end = time.monotonic() + timeout
        while not self._is_hanging() and time.monotonic() < end:
            time.sleep(0.01)
        raise queue.Empty


def test_a_process_that_ends_or_hangs_is_an_outcome_and_the_next_trial_is_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill = tmp_path / "kill"
    monkeypatch.chdir(tmp_path)
    target = open_custom(write(tmp_path, FAULTY))
    target.report(HARDWARE)
    try:
        with pytest.raises(TrialFailedError, match="memory") as caught:
            measure(target, 7)
        assert caught.value.outcome is Outcome.OUT_OF_MEMORY
        kill.touch()
        with pytest.raises(TargetKilledError, match="was killed by SIGKILL"):
            measure(target, 11)
        assert not kill.exists()
        found = measure(target, 2)
        assert found.device_seconds > 0
        assert found.backward_peak_bytes > 0
        process = target._process
        assert process is not None
        monkeypatch.setattr(
            process, "_replies", SilentQueue(lambda: "waiting for a lock" in last_output(process._tail))
        )
        with pytest.raises(TrialFailedError, match=r"within 600 s; its last output: .*waiting for a lock") as caught:
            measure(target, 10)
        assert caught.value.outcome is Outcome.TIMED_OUT
    finally:
        target.close()


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import a_library_that_is_missing", "crashed: ModuleNotFoundError: No module named 'a_library_that_is_miss"),
        ("x = = 1", "crashed: SyntaxError"),
        ("class Other: pass", r"/train.py has no 'Target'; its classes are Other"),
        (
            "class Target:\n        def build(self, config, device): ...",
            "'Target' has no method batch, step",
        ),
        (
            PLAIN.replace("return nn.Linear(64, 64, device=device)", "return {}"),
            "build returned dict, not an nn.Module",
        ),
        (PLAIN.replace("return nn.Linear(64, 64, device=device)", "return nn.ReLU()"), "without trained parameters"),
        (
            PLAIN.replace("self.config = config", "raise KeyError('width')"),
            r"crashed: KeyError: 'width' \(train.py line 7\)",
        ),
        (
            PLAIN.replace("loss.backward()", "loss = loss * float('inf')"),
            "the loss is not finite at micro-batch size 1",
        ),
        (PLAIN.replace("loss.backward()", "pass"), "crashed: the step leaves no gradients"),
        (PLAIN.replace("randn(micro_batch_size", "randn(3"), r"crashed: batch\(2\) has the shapes of batch\(1\)"),
    ],
)
def test_a_target_that_cannot_be_used_is_refused_with_the_cause(tmp_path: Path, source: str, reason: str) -> None:
    target = open_custom(write(tmp_path, source))
    with pytest.raises(UnsupportedTrialError, match=f"target 'local': .*{reason}"):
        target.report(HARDWARE)
    assert target._process is not None
    assert not target._process.alive


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import time; time.sleep(60)", "timed_out: the target did not answer within 0.5 s"),
        ("import os; os.abort()", "crashed: .*was killed by SIGABRT"),
        ("import sys; sys.exit('no licence')", "crashed: .*exited with status 1: no licence"),
    ],
)
def test_a_process_that_never_answers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, reason: str
) -> None:
    monkeypatch.setattr("bexp.workers.targets.custom.process.module_command", lambda _: [sys.executable, "-c", code])
    monkeypatch.setattr(CustomTarget, "_deadline", 0.5 if "sleep" in code else 60.0)
    with pytest.raises(UnsupportedTrialError, match=f"target 'local': {reason}"):
        open_custom(write(tmp_path, PLAIN)).report(HARDWARE)


@pytest.mark.parametrize(
    ("fields", "what"),
    [({"mode": "eval"}, "eval mode"), ({"execution": "compile"}, "torch.compile by the profiler")],
)
def test_what_no_custom_target_can_do_is_refused(fields: dict[str, Any], what: str) -> None:
    with pytest.raises(UnsupportedTrialError, match=f"measured as its code trains: no {what}"):
        open_custom("/nowhere/train.py:Target", **fields)


@pytest.mark.parametrize("command", ["describe", "measure"])
def test_what_runs_out_of_memory_in_a_heap_with_holes_runs_again_without_them(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    failures = [MemoryError("std::bad_alloc")]

    class Run:
        device = torch.device("cpu")

        def __init__(self, *_: object) -> None: ...

        def measure(self, size: int = 1) -> dict[str, Any]:
            if failures:
                raise failures.pop()
            return {"size": size}

        describe = measure

    monkeypatch.setattr(process, "TargetRun", Run)
    monkeypatch.setattr(process, "load_target", lambda reference: None)
    monkeypatch.setattr(process, "_limit_memory", lambda *limits: None)
    served = process.Served()
    opened = {"reference": "train.py:Target", "config": {}, "optimizer": "adamw", "seed": 0, "choice": {}}
    served.open({**opened, "device": "cpu", "memory_limit_bytes": 0, "context_bytes": 0})
    found = process.answer(getattr(served, command), {"micro_batch_size": 1})
    assert found == {"outcome": "ok", "size": 1}
