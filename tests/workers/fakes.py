"""A profiler without a device, and an exploration of three trials."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.event import EventCode, EventDraft, Progress
from bexp.explorer.records.measurement import Measurement, Outcome, PhaseSeconds
from bexp.explorer.records.recommendation import Answer, VariantAnswer
from bexp.explorer.records.trial import Measure, Trial, TrialKind, TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.workers.devices.lock import DeviceBusyError, DeviceLocks
from bexp.workers.process.interface import DeviceProfiler, ProfilerError, ProfilerInterruptedError
from tests.contracts.samples import make_candidate, make_recommendation, make_report
from tests.waits import PATIENCE_SECONDS

NUM_TRIALS = 3


class FakeProfiler(DeviceProfiler):
    """Measures in no time, unless a trial of `hanging` is asked for: that one waits to be interrupted."""

    devices = ("cpu",)
    restarts = 0

    def __init__(self, *, hanging: Sequence[int] = (), outcomes: Sequence[Outcome] = ()) -> None:
        self.calls: list[str] = []
        self.measured: list[int] = []
        self.is_hanging = threading.Event()
        self.failures: list[str] = []
        self._hanging = set(hanging)
        self._outcomes = dict(enumerate(outcomes))
        self._interrupted = threading.Event()
        self.before_measure: Callable[[TrialTask], None] = lambda plan: None

    def start(self) -> None:
        self.calls.append("start")
        self._interrupted.clear()

    def hardware(self) -> HardwareSpec:
        return make_report().hardware

    def begin(self, request: ExplorationRequest) -> DeviceReport:
        self.calls.append("begin")
        if self.failures:
            raise ProfilerError(self.failures.pop(0))
        return make_report()

    def measure(self, task: TrialTask) -> Measurement:
        if self._interrupted.is_set():
            raise ProfilerInterruptedError
        self.before_measure(task)
        if task.number in self._hanging:
            self.is_hanging.set()
            assert self._interrupted.wait(PATIENCE_SECONDS)
            raise ProfilerInterruptedError
        self.measured.append(task.number)
        outcome = self._outcomes.get(task.number, Outcome.OK)
        reason = None
        if outcome is not Outcome.OK:
            self.restarts += 1
            reason = "it was too large"
        phases = PhaseSeconds(process_start=5.0, build=0.25, timed=0.5)
        return Measurement(candidate=task.candidate, outcome=outcome, reason=reason, phases=phases)

    def interrupt(self) -> None:
        self.calls.append("interrupt")
        self._interrupted.set()

    def finish_job(self) -> None:
        self.calls.append("finish_job")

    def close(self) -> None:
        self.calls.append("close")


def fake_explore(
    request: ExplorationRequest, report: DeviceReport, measure: Measure, *, history: Sequence[Trial] = ()
) -> Iterator[Progress]:
    """Three trials, numbered on from the history, and an answer; nothing is found when `seed` is 13."""
    for number in range(len(history), NUM_TRIALS):
        task = TrialTask(
            number=number,
            kind=TrialKind.COMPONENTS,
            model=request.shapes,
            candidate=make_candidate(number + 1),
            timeout_seconds=1.0,
        )
        trial = Trial(number=number, kind=task.kind, measurement=measure(task))
        event = EventDraft(code=EventCode.TRIAL, message=f"trial {number}", data={"number": number})
        yield Progress((event,), trial=trial, recommendation=make_recommendation(number + 1))
    found = None if request.seed == 13 else make_recommendation(NUM_TRIALS)
    code = EventCode.SUCCEEDED if found else EventCode.NOTHING_FITS
    variant = VariantAnswer(
        num_query_groups=4, num_parameters=10, recommendation=found, reason=None if found else "too large"
    )
    yield Progress(
        (EventDraft(code=code, message="the end"),), recommendation=found, answer=Answer(variants=(variant,))
    )


class LockedProfiler(FakeProfiler):
    """A fake whose device has a lock, as that of `Profiler`. `together` counts who has it at the same time."""

    def __init__(self, folder: Path, together: list[int]) -> None:
        super().__init__()
        self.locks = DeviceLocks(["cpu"], directory=folder)
        self.num_rests = 0
        self._together = together

    @property
    def is_awaited(self) -> bool:
        return self.locks.are_awaited

    def take(self) -> bool:
        self.calls.append("take")
        try:
            self.locks.try_acquire()
        except DeviceBusyError as error:
            self.held_by = str(error)
        else:
            self.held_by = None
        return self.locks.are_held

    def start(self) -> None:
        super().start()
        assert self.locks.are_held

    def measure(self, task: TrialTask) -> Measurement:
        self._together.append(1)
        try:
            assert len(self._together) == 1
            return super().measure(task)
        finally:
            self._together.pop()

    def rest(self) -> None:
        super().rest()
        self.num_rests += 1
        self.locks.release()

    def close(self) -> None:
        super().close()
        self.locks.release()
