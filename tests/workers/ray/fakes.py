"""Profilers for actors, which the micro-batch size tells what to do, and a stand-in for Ray: threads with two CPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import Measurement, Outcome, PhaseSeconds
from bexp.explorer.records.trial import TrialKind, TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.workers.process.interface import DeviceProfiler
from tests.contracts.samples import make_candidate, make_report, make_request

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


def plan(number: int, size: int = 1, timeout: float = 5.0) -> TrialTask:
    """A trial of a micro-batch size."""
    return TrialTask(
        number=number,
        kind=TrialKind.COMPONENTS,
        model=make_request().model,
        candidate=make_candidate(size),
        timeout_seconds=timeout,
    )


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


class FakeRayError(Exception):
    pass


class FakeActorHandle:
    """Runs the calls of an actor one after another, in a thread."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._made = self._thread.submit(make)

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Future[Any]:
            return self._thread.submit(lambda: getattr(self._made.result(), name)(*arguments))

        return SimpleNamespace(remote=remote)

    def end(self) -> None:
        """Remove the actor's folder, too, which a killed process would leave behind."""
        self._thread.submit(lambda: self._made.result().close()).result()
        self._thread.shutdown()


class FakeRay:
    """What `bexp.workers.ray` uses of Ray."""

    exceptions = SimpleNamespace(RayError=FakeRayError)

    def __init__(self, num_cpus: int = 2) -> None:
        self.num_killed = 0
        self._num_cpus = num_cpus

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": float(self._num_cpus)}

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "0123456789abcdef")

    def remote(self, actor_class: Callable[..., Any]) -> Any:
        def make(*arguments: Any) -> FakeActorHandle:
            return FakeActorHandle(lambda: actor_class(*arguments))

        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=make))

    def wait(self, references: Sequence[Future[Any]], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        condition = FIRST_COMPLETED if num_returns == 1 else ALL_COMPLETED
        done, rest = wait_for_futures(references, timeout, condition)
        return list(done), list(rest)

    def get(self, reference: Future[Any]) -> Any:
        try:
            return reference.result()
        except RuntimeError as error:
            raise FakeRayError(str(error)) from error

    def kill(self, actor: FakeActorHandle) -> None:
        self.num_killed += 1
        actor.end()


class UnlikeProfilers:
    """Opens profilers of devices that differ in memory."""

    def __init__(self) -> None:
        self.num_opened = 0

    def __call__(self, *_: object) -> FakeActorProfiler:
        self.num_opened += 1
        return FakeActorProfiler(memory_bytes=10**10 + self.num_opened)
