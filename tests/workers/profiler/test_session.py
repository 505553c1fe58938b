"""The child's side of a trial, without the process around it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.meshes.shards import SPREAD_EXPERTS
from bexp.explorer.model.base import Frozen
from bexp.explorer.model.training import Sharding
from bexp.explorer.records.measurement import Measurement, Outcome
from bexp.explorer.search.suggestion import LONG_STEP_SECONDS
from bexp.kernels.attention import attention_backend
from bexp.kernels.probe import failure_of
from bexp.workers.instruments import phases
from bexp.workers.instruments.device_instruments import Instruments
from bexp.workers.instruments.device_monitor import DeviceMonitor
from bexp.workers.instruments.failures import TargetKilledError, TrialFailedError
from bexp.workers.process.protocol import (
    Begin,
    ComponentMeasured,
    ComponentStarted,
    ReportReply,
    RunTrial,
    TrialFinished,
)
from bexp.workers.profiler import session as session_module
from bexp.workers.profiler.session import Session
from bexp.workers.targets.reference import target as reference_target
from tests.workers.profiler.fakes import FakeGpu
from tests.workers.profiler.samples import HARDWARE, REQUEST, candidate, components_of, plan, whole_model_plan


class UnlimitedBench(Instruments):
    """Leaves the limits of the test's own process alone."""

    leftover = 0

    def limit_memory(self, limit_bytes: int, context_bytes: int) -> None:
        self.limited = limit_bytes

    def settle(self, *, release: bool, kept_bytes: int = 0) -> int:
        return self.leftover


@pytest.fixture
def instruments() -> UnlimitedBench:
    return UnlimitedBench(torch.device("cpu"))


@pytest.fixture
def sent() -> list[Frozen]:
    return []


@pytest.fixture
def session(instruments: UnlimitedBench, sent: list[Frozen]) -> Session:
    session = Session(instruments, None, sent.append)
    assert session.answer(Begin(request=REQUEST, hardware=HARDWARE))
    assert isinstance(sent.pop(), ReportReply)
    return session


def finish(sent: list[Frozen]) -> TrialFinished:
    """The last message, which ends a trial."""
    assert isinstance(sent[-1], TrialFinished)
    return sent[-1]


def test_components_are_told_one_by_one(session: Session, sent: list[Frozen], monkeypatch: pytest.MonkeyPatch) -> None:
    moments = itertools.count()
    monkeypatch.setattr(phases, "time", SimpleNamespace(perf_counter=lambda: float(next(moments))))
    chosen = candidate()
    components = components_of(chosen)[:2]
    assert session.answer(RunTrial(task=plan(chosen, components)))
    assert [type(message) for message in sent] == [
        *(ComponentStarted, ComponentMeasured),
        *(ComponentStarted, ComponentMeasured),
        TrialFinished,
    ]
    finished = finish(sent)
    assert [m.component for m in finished.measurement.components] == list(components)
    assert finished.measurement.phases.total == finished.seconds - 1, "one look at the clock earlier"


@pytest.mark.parametrize("is_lost", [False, True])
def test_whatever_a_target_raises_refuses_the_job_unless_the_device_is_lost(
    instruments: UnlimitedBench, sent: list[Frozen], monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    def fail(*_: object) -> None:
        raise TypeError("a fault in a model")

    monkeypatch.setattr(session_module, "open_target", fail)
    monkeypatch.setattr(session_module, "is_poisoned", lambda _: is_lost)
    begin = Begin(request=REQUEST, hardware=HARDWARE)
    if is_lost:
        with pytest.raises(TypeError):
            Session(instruments, None, sent.append).answer(begin)
        return
    assert Session(instruments, None, sent.append).answer(begin), "fit for the next job"
    assert isinstance(sent[0], ReportReply)
    assert str(sent[0].report.refusal).startswith("TypeError: a fault in a model (test_session.py line ")


@pytest.mark.parametrize(
    ("error", "outcome", "killed"),
    [
        (MemoryError("std::bad_alloc"), Outcome.OUT_OF_MEMORY, False),
        (RuntimeError("the kernel gave up"), Outcome.CRASHED, False),
        (TypeError("a fault in a block"), Outcome.CRASHED, False),
        (TrialFailedError(Outcome.CRASHED, "the target's process has crashed"), Outcome.CRASHED, False),
        (TargetKilledError(Outcome.CRASHED, "the target's process was killed"), Outcome.CRASHED, True),
    ],
)
def test_whatever_a_block_raises_is_an_outcome_that_says_whether_the_process_of_a_target_was_killed(
    session: Session,
    sent: list[Frozen],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    outcome: Outcome,
    killed: bool,
) -> None:
    class Broken(nn.Module):
        def forward(self, *_: object) -> None:
            raise error

    monkeypatch.setattr(reference_target, "build_block", lambda *_, **__: Broken())
    chosen = candidate()
    assert session.answer(RunTrial(task=plan(chosen, components_of(chosen)[1:2]))), "fit for the next trial"
    finished = finish(sent)
    assert finished.measurement.outcome is outcome
    assert str(error) in (finished.measurement.reason or "")
    assert finished.measurement.failed_component == components_of(chosen)[1]
    assert (finished.poisoned, finished.target_killed) == (False, killed)


def test_memory_that_runs_out_while_a_back_end_is_tried_is_no_reason_against_it(
    session: Session, sent: list[Frozen], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = candidate()
    flash = attention_backend(str(chosen.attention_backend))

    def exhaust(*_: torch.Tensor) -> torch.Tensor:
        return torch.empty(1 << 62, dtype=torch.uint8)

    hungry = replace(flash, unsupported_reason=lambda _, device: failure_of(exhaust, device))
    trial = RunTrial(task=plan(chosen, components_of(chosen)[1:2]))
    outcomes = []
    for backend in (hungry, flash):
        monkeypatch.setattr(reference_target, "attention_backend", lambda _, backend=backend: backend)
        assert session.answer(trial)
        outcomes.append(finish(sent).measurement.outcome)
    assert outcomes == [Outcome.OUT_OF_MEMORY, Outcome.OK]


@pytest.mark.parametrize("measurer", ["measure_component", "measure_optimizer", "run_whole_model"])
def test_what_runs_out_of_memory_in_a_heap_with_holes_runs_again_without_them(
    session: Session, sent: list[Frozen], monkeypatch: pytest.MonkeyPatch, measurer: str
) -> None:
    measure, failures = getattr(session_module, measurer), [MemoryError("std::bad_alloc")]

    def measure_or_fail(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return measure(*arguments)

    monkeypatch.setattr(session_module, measurer, measure_or_fail)
    chosen = candidate()
    at = slice(-1, None) if measurer == "measure_optimizer" else slice(1, 2)
    is_whole = measurer == "run_whole_model"
    task = whole_model_plan(chosen) if is_whole else plan(chosen, components_of(chosen)[at])
    assert session.answer(RunTrial(task=task))
    assert (finish(sent).measurement.outcome, failures) == (Outcome.OK, [])


def test_memory_that_a_trial_leaves_behind_asks_for_a_new_process(
    session: Session, instruments: UnlimitedBench, sent: list[Frozen]
) -> None:
    instruments.leftover = 1 << 30
    chosen = candidate()
    assert not session.answer(RunTrial(task=plan(chosen, components_of(chosen)[:1])))
    finished = finish(sent)
    assert finished.poisoned
    assert finished.measurement.outcome is Outcome.OK, "what was measured before is sound"


def test_compiling_without_a_compiler_is_unsupported(
    instruments: UnlimitedBench, sent: list[Frozen], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    session = Session(instruments, None, sent.append)
    session.answer(Begin(request=REQUEST.model_copy(update={"execution": Execution.COMPILE}), hardware=HARDWARE))
    session.answer(RunTrial(task=plan(candidate())))
    finished = finish(sent)
    assert finished.measurement.outcome is Outcome.UNSUPPORTED
    assert "compiler" in (finished.measurement.reason or "")


def test_a_whole_model_that_cannot_be_captured_is_unsupported(
    instruments: UnlimitedBench, sent: list[Frozen], caplog: pytest.LogCaptureFixture
) -> None:
    session = Session(instruments, None, sent.append)
    session.answer(Begin(request=REQUEST.model_copy(update={"execution": Execution.GRAPH}), hardware=HARDWARE))
    report = next(message.report for message in sent if isinstance(message, ReportReply))
    assert {
        support.name: support.reason for support in report.choices["execution"] if not support.usable
    } == dict.fromkeys(("graph", "compile+graph"), "CUDA graphs need a GPU")
    session.answer(RunTrial(task=whole_model_plan(candidate())))
    finished = finish(sent)
    assert finished.measurement.outcome is Outcome.UNSUPPORTED
    assert "cannot be replayed as CUDA graphs: CUDA graphs need" in (finished.measurement.reason or "")
    assert "operation by operation" in caplog.text


def test_a_request_may_lower_the_memory_limit_and_not_raise_it(instruments: UnlimitedBench, sent: list[Frozen]) -> None:
    session = Session(instruments, None, sent.append)
    for gib, expected in ((None, 1 << 33), (1.0, 1 << 30), (100.0, 1 << 34)):
        session.answer(Begin(request=REQUEST.model_copy(update={"memory_limit_gib": gib}), hardware=HARDWARE))
        assert instruments.limited == expected


def finished_trials(sent: list[Frozen]) -> list[Measurement]:
    return [message.measurement for message in sent if isinstance(message, TrialFinished)]


def test_every_timing_carries_its_conditions(instruments: UnlimitedBench, session: Session, sent: list[Frozen]) -> None:
    gpu = FakeGpu()
    instruments.monitor = DeviceMonitor(gpu, gpu.foreign_processes())
    chosen = candidate()
    session.answer(RunTrial(task=plan(chosen)))
    session.answer(RunTrial(task=whole_model_plan(chosen)))
    components, whole = finished_trials(sent)
    found = [m.conditions for m in components.components]
    assert len(found) == len(components_of(chosen))
    assert whole.whole_model is not None
    for conditions in (*found, whole.whole_model.conditions):
        assert conditions is not None
        assert conditions.sm_clock_mhz == 1980
        assert conditions.contamination is None


def test_a_long_step_of_a_whole_model_is_timed_once_on_a_host_with_the_same_peak(
    session: Session, sent: list[Frozen], monkeypatch: pytest.MonkeyPatch
) -> None:
    for longest in (math.inf, 0.0):
        monkeypatch.setitem(LONG_STEP_SECONDS, "cpu", longest)
        session.answer(RunTrial(task=whole_model_plan(candidate())))
    short, long = (trial.whole_model for trial in finished_trials(sent))
    assert short is not None and long is not None
    assert (short.repeats >= 3, long.repeats) == (True, 1)
    assert long.peak_bytes == short.peak_bytes


def test_a_trial_after_a_disturbed_one_waits_for_the_device_to_calm_down(
    instruments: UnlimitedBench, session: Session, sent: list[Frozen]
) -> None:
    gpu = FakeGpu(reasons=("hw_thermal_slowdown",))
    waited: list[float] = []

    class Patient(DeviceMonitor):
        def wait_until_calm(self, seconds: float) -> bool:
            waited.append(seconds)
            gpu.reasons = ("sw_power_cap",)
            return True

    instruments.monitor = Patient(gpu, gpu.foreign_processes())
    chosen = candidate()
    for _ in range(3):
        session.answer(RunTrial(task=plan(chosen, components_of(chosen)[:1])))
    first, *others = finished_trials(sent)
    assert "throttled" in str(first.contamination)
    assert first.outcome is Outcome.OK, "what a contamination leads to is the search's to decide"
    assert [m.contamination for m in others] == [None, None]
    assert len(waited) == 1
    assert 0 < waited[0] <= 10


def test_a_replacement_is_told_who_was_there_at_the_beginning(instruments: UnlimitedBench, sent: list[Frozen]) -> None:
    gpu = FakeGpu(others=3 << 30)
    instruments.monitor = DeviceMonitor(gpu, gpu.foreign_processes(used_before=3 << 30))
    first = Session(instruments, None, sent.append)
    first.answer(Begin(request=REQUEST, hardware=HARDWARE))
    reply = sent.pop()
    assert isinstance(reply, ReportReply)
    assert reply.others_bytes == 3 << 30
    gpu.others = 9 << 30
    instruments.monitor = DeviceMonitor(gpu, gpu.foreign_processes(used_before=9 << 30))
    second = Session(instruments, None, sent.append)
    second.answer(Begin(request=REQUEST, hardware=HARDWARE, others_bytes=reply.others_bytes))
    chosen = candidate()
    second.answer(RunTrial(task=plan(chosen, components_of(chosen)[:1])))
    (measurement,) = finished_trials(sent)
    assert "took 6 GiB" in str(measurement.contamination)


def test_the_blocks_of_one_device_of_a_mesh_are_measured(session: Session, sent: list[Frozen]) -> None:
    shard = {"micro_batch_size": 2, "tensor_parallel_size": 2}
    components = (
        Component(kind=ComponentKind.ATTENTION, backend="flash", micro_batch_size=2),
        Component(kind=ComponentKind.ATTENTION, backend="flash", **shard),
        Component(
            kind=ComponentKind.MOE_FFN, part=SPREAD_EXPERTS, backend="grouped_mm", expert_parallel_size=4, **shard
        ),
        Component(kind=ComponentKind.OPTIMIZER, micro_batch_size=0, tensor_parallel_size=2, sharding=Sharding.NONE),
    )
    assert session.answer(RunTrial(task=plan(candidate(), components)))
    finished = finish(sent)
    assert finished.measurement.outcome is Outcome.OK, finished.measurement.reason
    measured = finished.measurement.components
    assert tuple(each.component for each in measured) == components
    assert measured[1].saved_bytes < measured[0].saved_bytes
