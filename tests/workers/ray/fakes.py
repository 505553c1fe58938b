"""Profilers for the actors of a cluster that measure nothing: what they do is told by the micro-batch size."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import Measurement, Outcome, PhaseSeconds
from bexp.explorer.records.trial import TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.workers.process.interface import DeviceProfiler
from tests.contracts.samples import make_report

SLOW, DEADLY, CRASHING, BROKEN = 64, 65, 66, 67
SLOW_SECONDS = 1.5
GATE = "BEXP_TEST_GATE"
"""Names a folder in the environment of actors: there a slow trial says that it has begun, and waits for `OPEN`."""
OPEN = "open"


class FakeActorProfiler(DeviceProfiler):
    """Measures in no time, unless it is told otherwise."""

    restarts = 0

    def __init__(self, memory_bytes: int | None = None) -> None:
        self._memory_bytes = memory_bytes

    def start(self) -> None:
        pass

    def hardware(self) -> HardwareSpec:
        hardware = make_report().hardware
        return hardware.model_copy(update={"memory_bytes": self._memory_bytes}) if self._memory_bytes else hardware

    def begin(self, request: ExplorationRequest) -> DeviceReport:
        return make_report()

    def measure(self, task: TrialTask) -> Measurement:
        size = task.candidate.micro_batch_size
        outcome = Outcome.OK
        if size == SLOW:
            _take_long(task.number)
        elif size == DEADLY:
            os._exit(1)
        elif size == CRASHING:
            self.restarts += 1
            outcome = Outcome.CRASHED
        elif size == BROKEN:
            raise RuntimeError("the device is broken")
        return Measurement(candidate=task.candidate, outcome=outcome, phases=PhaseSeconds(timed=0.01))

    def interrupt(self) -> None:
        raise AssertionError("an actor is ended, not interrupted")

    def finish_job(self) -> None:
        raise AssertionError("an actor is ended with its job")

    def close(self) -> None:
        pass


def _take_long(number: int) -> None:
    if GATE not in os.environ:
        time.sleep(SLOW_SECONDS)
        return
    folder = Path(os.environ[GATE])
    begun = folder / f"{number}.new"
    begun.write_text(str(os.getpid()))
    begun.rename(folder / f"{number}.begun")  # whole, for those who wait for it
    while not (folder / OPEN).exists():
        time.sleep(0.02)


def open_fake(devices: Sequence[str], environment: Mapping[str, str], locks: Path | None) -> FakeActorProfiler:
    """On every node the same device."""
    assert devices == ("cpu",)
    assert environment["OMP_NUM_THREADS"] == "1"
    assert locks is not None
    return FakeActorProfiler()
