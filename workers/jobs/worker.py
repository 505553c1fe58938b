"""The claim loop of a device or a group: one job at a time, and a profiler process ready for the next."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType
from typing import Self

import sqlalchemy as sa

from bexp.explorer.search.explore import explore
from bexp.explorer.spec.hardware import HardwareSpec
from bexp.storage.database import DATABASE_TROUBLE, Database, describe_trouble
from bexp.storage.ids import worker_prefix
from bexp.storage.leases import Claim
from bexp.storage.notifications import Listener
from bexp.storage.queue import Queue
from bexp.storage.workers import LIVE_WITHIN, WorkerInfo, forget_worker, register_worker, worker_heartbeat
from bexp.targets.registry import installed_targets
from bexp.workers.jobs.runner import HOST_TROUBLE, Explore, JobEnd, run_job
from bexp.workers.process.interface import DeviceProfiler, ProfilerError, ProfilerInterruptedError, ProfilerStartError

_log = logging.getLogger(__name__)

MIN_POLL_SECONDS = 0.05
MAX_POLL_SECONDS = 1.0
"""How long an idle worker waits before it asks for a job again, unless its settings say otherwise."""

LISTENING_FACTOR = 4
"""So much longer waits an idle worker that is told of queued jobs. A lease that runs out is not told."""

START_PAUSES_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, 60.0)
"""The pauses before a device that was usable is tried again."""


class JobWorker:
    """Owns one device, or several for trials that run on all of them, and takes jobs that need no more devices.

    The profiler process is ready before a job comes. After a job it stays if the job left it clean, else one that was
    started in advance takes its place. `stop` may be called from any thread. With `job_ids`, the worker runs only those
    jobs; they are iterated over before each claim, so there may be others each time. With a `name`, it runs only those
    whose own worker it is. `targets` has the version of each
    target by name, and `software` that of each package that the speed of a component depends on; the default is what is
    installed here. An idle worker polls at intervals that grow to `max_poll_seconds`. `hardware` is None until the
    device is ready.
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
        self._start_pauses_seconds = tuple(start_pauses_seconds)
        self._listener: Listener | None = None
        self.hardware: HardwareSpec | None = None
        self._stopping = threading.Event()
        self._noticed = threading.Event()

    def run(self, *, max_jobs: int | None = None) -> None:
        """Claim and run jobs until `stop` is called, or `max_jobs` have been run.

        Raises:
            ProfilerError: the device cannot be used, not even by a new process after several minutes.
        """
        try:
            hardware = self.hardware = self._find_hardware()
            info = WorkerInfo(
                id=self.id,
                host=self._host,
                pid=os.getpid(),
                device_kind=hardware.device_kind,
                device_name=hardware.device_name,
                num_devices=hardware.num_devices,
                fingerprint=hardware.fingerprint,
                targets=self._targets,
                devices=self._device,
                versions=hardware.versions.model_dump(exclude_none=True) | self._software,
                memory_limit_bytes=hardware.memory_limit_bytes,
                memory_bytes=hardware.most_memory_bytes,
                name=self.name,
            )
            _log.info("worker %s is ready: %s", self.id, hardware.describe())
            with Registration(self._queue.database, info):
                self._serve(info, hardware.describe(), max_jobs)
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
        """Who else holds the device, while this worker waits for it."""
        return self._profiler.held_by

    @property
    def database(self) -> Database:
        """Where it looks for jobs."""
        return self._queue.database

    def _find_hardware(self) -> HardwareSpec:
        """Return the device. A process that is killed as it starts is no fault of the device: another one is started.

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
        """Start the profiler for the next job. A device that was usable before is tried again for some minutes.

        Raises:
            ProfilerError: it is still unusable.
        """
        for pause in self._start_pauses_seconds:
            try:
                return self._profiler.start()
            except (ProfilerError, *HOST_TROUBLE) as error:
                _log.warning("the device cannot be used: %s; it is tried again in %g s", error, pause)
            self._wait(pause)
        return self._profiler.start()

    def _wait(self, seconds: float) -> None:
        if self._stopping.wait(seconds):
            raise ProfilerInterruptedError("the worker ends")

    def _serve(self, info: WorkerInfo, description: str, max_jobs: int | None) -> None:
        num_jobs = 0
        pause = MIN_POLL_SECONDS
        while not self._stopping.is_set() and num_jobs != max_jobs:
            self._noticed.clear()  # before the claim, which then sees what was queued earlier
            claim = self._claim(info, description)
            if claim is None:
                if self._stopping.is_set():  # since before the event was cleared
                    break
                self._noticed.wait(pause)
                is_told = self._listener is not None and self._listener.is_listening
                pause = min(2 * pause, self._max_poll_seconds * (LISTENING_FACTOR if is_told else 1))
                continue
            pause = MIN_POLL_SECONDS
            num_jobs += 1
            self._run(claim)
            if not self._stopping.is_set() and num_jobs != max_jobs:
                self._make_ready()

    def _claim(self, info: WorkerInfo, description: str) -> Claim | None:
        try:
            among = None if self._job_ids is None else tuple(self._job_ids)  # which may ask the database
            return self._queue.claim(info, description=description, among=among)
        except DATABASE_TROUBLE as error:
            _log.warning("no job could be claimed: %s", describe_trouble(error))
            return None

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


class Registration:
    """Registers a worker, and renews the entry in a thread. Leaving the context removes the entry."""

    def __init__(self, database: Database, worker: WorkerInfo) -> None:
        self._database = database
        self._worker = worker
        self._every_seconds = (LIVE_WITHIN / 3).total_seconds()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"registration-{worker.id}", daemon=True)

    def __enter__(self) -> Self:
        try:
            register_worker(self._database, self._worker)
        except DATABASE_TROUBLE as trouble:  # the thread does it later
            _log.warning("worker %s is not in the list yet: %s", self._worker.id, describe_trouble(trouble))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        try:
            forget_worker(self._database, self._worker.id)
        except sa.exc.SQLAlchemyError as trouble:  # the entry expires
            _log.warning("worker %s could not be removed from the list: %s", self._worker.id, describe_trouble(trouble))

    def _beat(self) -> None:
        while not self._ended.wait(self._every_seconds):
            try:
                if not worker_heartbeat(self._database, self._worker.id):
                    register_worker(self._database, self._worker)
            except sa.exc.SQLAlchemyError as error:
                reason = describe_trouble(error)
                _log.warning("worker %s could not report to the database: %s", self._worker.id, reason)


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
