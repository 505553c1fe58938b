"""The claim loop of a device or a group: one job at a time, and a profiler process ready for the next."""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType, TracebackType
from typing import Self, TypeVar

import sqlalchemy as sa

from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.search.explore import explore
from bexp.storage.database import DATABASE_TROUBLE, Database, describe_trouble
from bexp.storage.ids import worker_prefix
from bexp.storage.leases import Claim
from bexp.storage.notifications import Listener
from bexp.storage.queue import Queue
from bexp.storage.workers import LIVE_WITHIN, WorkerInfo, forget_worker, register_worker
from bexp.targets.registry import installed_targets
from bexp.workers.devices.discovery import read_gpus
from bexp.workers.devices.lock import POLL_SECONDS, DeviceBusyError
from bexp.workers.jobs.runner import HOST_TROUBLE, Explore, JobEnd, run_job
from bexp.workers.process.interface import DeviceProfiler, ProfilerError, ProfilerInterruptedError, ProfilerStartError


class Registration:
    """A worker's entry in the list, made by `tell`, renewed in a thread, and ended with the context.

    While the database is away, the worker goes on, and the thread makes the entry later. `gpus` are the UUIDs by name
    of the GPUs that each report reads.
    """

    def __init__(self, database: Database, gpus: Mapping[str, str] = MappingProxyType({})) -> None:
        self._database = database
        self._gpus = gpus
        self._worker: WorkerInfo | None = None
        self._every_seconds = (LIVE_WITHIN / 3).total_seconds()
        self._ended = threading.Event()
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._beat, name="registration", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self._worker is None:
            return
        try:
            forget_worker(self._database, self._worker.id)
        except sa.exc.SQLAlchemyError as trouble:  # the entry expires
            _log.warning("worker %s could not be removed from the list: %s", self._worker.id, describe_trouble(trouble))

    def tell(self, worker: WorkerInfo) -> None:
        """Enter the worker as it is now."""
        if worker != self._worker:
            self._worker = worker
            self._report()

    def _beat(self) -> None:
        while not self._ended.wait(self._every_seconds):
            self._report()

    def _report(self) -> None:
        with self._writing:
            if self._worker is None:
                return
            try:
                register_worker(self._database, replace(self._worker, gpus=read_gpus(self._gpus)))
            except sa.exc.SQLAlchemyError as error:
                reason = describe_trouble(error)
                _log.warning("worker %s could not report to the database: %s", self._worker.id, reason)


_log = logging.getLogger(__name__)

T = TypeVar("T")

MIN_POLL_SECONDS = 0.05
MAX_POLL_SECONDS = 1.0
"""How long an idle worker waits before it asks for a job again, unless its settings say otherwise."""

LISTENING_FACTOR = 4
"""An idle worker that is notified of queued jobs waits so many times as long. No notice says that a lease runs out."""

REST_SECONDS = 5.0
"""So long an idle worker keeps its device, unless somebody waits for the device."""

START_PAUSES_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, 60.0)
"""The pauses before a device that was usable is tried again."""


class JobWorker:
    """The worker of one device, or of several for trials that run on all of them. It takes jobs that need no more.

    A job is claimed once the worker has the device. After a job the profiler process stays if the job left it clean,
    else one that was started in advance takes its place. An idle worker gives the device back, so that others may use
    it. `stop` may be called from any thread. `hardware` is None until the device was measured.

    Args:
        queue: where jobs are claimed.
        profiler: of the device or devices.
        device: the name of the device in the worker's id.
        explore: runs an exploration.
        job_ids: run only these jobs. They are iterated over before each claim, so they may differ each time.
        name: run only jobs whose own worker has this name.
        targets: the version of each target by name; default: the installed ones.
        software: the version of each package that the speed of a component depends on; default: as installed.
        max_poll_seconds: an idle worker polls at intervals that grow to this.
        device_wait_seconds: how long to wait for the device at most.
        start_pauses_seconds: the pauses before a device that was usable is tried again.
    """

    def __init__(
        self,
        queue: Queue,
        profiler: DeviceProfiler,
        device: str,
        *,
        explore: Explore = explore,
        job_ids: Iterable[str] | None = None,
        name: str = "",
        targets: Mapping[str, str] | None = None,
        software: Mapping[str, str] | None = None,
        max_poll_seconds: float = MAX_POLL_SECONDS,
        device_wait_seconds: float = math.inf,
        start_pauses_seconds: Sequence[float] = START_PAUSES_SECONDS,
    ) -> None:
        host = socket.gethostname()
        self.id = f"{worker_prefix(host, os.getpid())}{device}-{secrets.token_hex(2)}"
        self.name = name
        self._host = host
        self._device = device
        self._queue = queue
        self._profiler = profiler
        self._explore = explore
        self._job_ids = job_ids
        self._targets = dict(installed_targets() if targets is None else targets)
        self._software = dict(installed_software() if software is None else software)
        self._max_poll_seconds = max_poll_seconds
        self._device_wait_seconds = device_wait_seconds
        self._start_pauses_seconds = tuple(start_pauses_seconds)
        self._listener: Listener | None = None
        self._has_work = False  # a job waits that needs the device
        self.hardware: HardwareSpec | None = None
        self._stopping = threading.Event()
        self._noticed = threading.Event()

    def run(self, *, max_jobs: int | None = None) -> None:
        """Claim and run jobs until `stop` is called, or `max_jobs` have been run.

        Raises:
            ProfilerError: the device cannot be used, not even by a new process after several minutes.
            DeviceBusyError: another process kept it for all the time that this may wait.
        """
        try:
            with Registration(self._queue.database, self._profiler.gpus) as registration:
                self._await_device(registration)
                self.hardware = self._find_hardware()
                registration.tell(self._describe())
                _log.info("worker %s is ready: %s", self.id, self.hardware.describe())
                self._serve(registration, max_jobs)
        except ProfilerInterruptedError:
            if not self._stopping.is_set():
                raise
        finally:
            self._profiler.close()

    def stop(self) -> None:
        """End soon. A running job is put back into the queue, and keeps its measurements."""
        self._stopping.set()
        self._noticed.set()
        self._profiler.interrupt()

    def rely_on(self, listener: Listener) -> None:
        """Poll LISTENING_FACTOR times less often while `listener`, which calls `notice`, listens for queued jobs."""
        self._listener = listener

    def notice(self) -> None:
        """Ask for a job soon, because one may have been queued. May be called from any thread."""
        self._noticed.set()

    @property
    def device_held(self) -> str | None:
        """The other holder of the device, while this worker waits for it."""
        return self._profiler.held_by

    @property
    def database(self) -> Database:
        """The database with the jobs."""
        return self._queue.database

    def _await_device(self, registration: Registration) -> None:
        """Wait until the device is free for the first time, while the worker is in the list."""
        deadline = time.monotonic() + self._device_wait_seconds
        while not self._profiler.take():
            registration.tell(self._describe())
            if time.monotonic() >= deadline:
                raise DeviceBusyError(self._profiler.held_by or "")
            self._wait(POLL_SECONDS)

    def _describe(self) -> WorkerInfo:
        hardware, devices = self.hardware, self._profiler.devices
        known = WorkerInfo(
            id=self.id,
            host=self._host,
            pid=os.getpid(),
            device_kind=devices[0].partition(":")[0] if devices else "",
            device_name="",
            num_devices=len(devices),
            fingerprint="",
            memory_limit_bytes=0,
            memory_bytes=0,
            targets=self._targets,
            devices=self._device,
            versions=self._software,
            held_by=self._profiler.held_by,
            name=self.name,
        )
        if hardware is None:
            return known
        return replace(
            known,
            device_kind=hardware.device_kind,
            device_name=hardware.device_name,
            num_devices=hardware.num_devices,
            fingerprint=hardware.fingerprint,
            memory_limit_bytes=hardware.memory_limit_bytes,
            memory_bytes=hardware.most_memory_bytes,
            versions=hardware.versions.model_dump(exclude_none=True) | self._software,
        )

    def _find_hardware(self) -> HardwareSpec:
        """Return the device's hardware. If a process is killed as it starts, another one is started.

        Raises:
            ProfilerError: there is no such device, or each process was killed.
        """
        for pause in self._start_pauses_seconds:
            try:
                self._profiler.start()
                return self._profiler.hardware()
            except ProfilerStartError as error:
                _log.warning("%s; it is tried again in %g s", error, pause)
            self._wait(pause)
        self._profiler.start()
        return self._profiler.hardware()

    def _make_ready(self) -> None:
        """Start the profiler for the next job, after anybody who waits for the device has had it."""
        if self._profiler.is_awaited:
            self._profiler.rest()
        elif self._profiler.take():
            self._profiler.start()
            self.hardware = self._profiler.hardware()

    def _patiently(self, use: Callable[[], T]) -> T:
        """Return the result of `use`. A device that was usable before is tried again for some minutes.

        Raises:
            ProfilerError: it is still unusable.
        """
        for pause in self._start_pauses_seconds:
            try:
                return use()
            except (ProfilerError, *HOST_TROUBLE) as error:
                _log.warning("the device cannot be used: %s; it is tried again in %g s", error, pause)
            self._wait(pause)
        return use()

    def _wait(self, seconds: float) -> None:
        if self._stopping.wait(seconds):
            raise ProfilerInterruptedError("the worker ends")

    def _serve(self, registration: Registration, max_jobs: int | None) -> None:
        num_jobs = 0
        pause = MIN_POLL_SECONDS
        idle_since = time.monotonic()
        while not self._stopping.is_set() and num_jobs != max_jobs:
            self._noticed.clear()  # before the claim, which then sees what was queued earlier
            claim = self._claim()
            if claim is None:
                self._rest(idle_since)
            registration.tell(self._describe())
            if claim is None:
                if self._stopping.is_set():  # since before the event was cleared
                    break
                pause = min(pause, self._longest_pause)
                self._noticed.wait(pause)
                pause *= 2
                continue
            pause = MIN_POLL_SECONDS
            num_jobs += 1
            self._run(claim)
            if not self._stopping.is_set() and num_jobs != max_jobs:
                self._patiently(self._make_ready)
            idle_since = time.monotonic()

    def _claim(self) -> Claim | None:
        """Return a job to run on the device, which the worker then has."""
        self._has_work = False
        assert self.hardware is not None, "it was measured before"
        try:
            among = None if self._job_ids is None else tuple(self._job_ids)  # iterating may ask the database
            description = self.hardware.describe()
            return self._queue.claim(self._describe(), description=description, among=among, is_able=self._take_device)
        except DATABASE_TROUBLE as error:
            _log.warning("no job could be claimed: %s", describe_trouble(error))
            return None

    def _take_device(self) -> bool:
        self._has_work = True
        return self._patiently(self._profiler.take)

    def _rest(self, idle_since: float) -> None:
        """Give the device back if somebody waits for it, or after a while. Without work, stop waiting for it."""
        if self._profiler.held_by is not None:
            is_over = not self._has_work
        else:
            is_over = self._profiler.is_awaited or time.monotonic() - idle_since > REST_SECONDS
        if is_over:
            self._profiler.rest()

    @property
    def _longest_pause(self) -> float:
        """Most seconds until the next claim; few while another holds the device, because no notice says it is free."""
        if self._profiler.held_by is not None:
            return min(self._max_poll_seconds, MAX_POLL_SECONDS)
        is_told = self._listener is not None and self._listener.is_listening
        return self._max_poll_seconds * (LISTENING_FACTOR if is_told else 1)

    def _run(self, claim: Claim) -> None:
        _log.info("exploration %s begins (attempt %d)", claim.job.id, claim.lease.attempt)
        end = run_job(
            claim, self._queue, self._profiler, stopping=self._stopping, explore=self._explore, software=self._software
        )
        _log.info("exploration %s: %s", claim.job.id, end)
        if end in {JobEnd.SUCCEEDED, JobEnd.FAILED}:
            self._profiler.finish_job()
        else:
            self._profiler.close()


PACKAGES = (
    *("bexp", "transformers", "liger-kernel", "peft", "bitsandbytes", "torchao"),
    *("flash-attn", "flash-attn-3", "flash-attn-4"),
)
"""Packages that the speed of a component depends on."""


def installed_software() -> dict[str, str]:
    """Return the version of each of `PACKAGES` that is installed, by name."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
