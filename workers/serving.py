"""Workers that run in one process: a worker for each profiler, their threads, and the jobs that they may run."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from filelock import Timeout

from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.model.target import BEXP, LOCAL, name_local_target
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.explore import explore
from bexp.storage.database import DATABASE_TROUBLE, Database, DatabaseLimits, describe_trouble, open_database
from bexp.storage.jobs import JobNotFoundError, JobState, get_summary
from bexp.storage.matching import OWN_WORKER, OWN_WORKER_TERM, keep_job
from bexp.storage.notifications import QUEUED_JOBS, Listener
from bexp.storage.queue import Queue
from bexp.storage.schema import NewerSchemaError, upgrade
from bexp.storage.waiting import DEVICE_HELD, find_reason, list_waiting_ids, note_reason, read_requests
from bexp.targets.registry import installed_targets
from bexp.workers.devices.lock import DeviceBusyError
from bexp.workers.jobs.worker import JobWorker
from bexp.workers.process.interface import DeviceProfiler, ProfilerError
from bexp.workers.replay.profiler import ReplayProfiler, mismatch
from bexp.workers.replay.recording import Recording
from bexp.workers.settings import WorkerSettings

SERVICE_FAILED = 3
"""The exit status if the database or a device cannot be used. argparse exits with 2 on wrong usage."""

CONNECTIONS_OF_A_WORKER = 3
"""The connections of a busy worker: for its steps, its lease and its entry in the list."""

MAX_CONNECTIONS = 10
"""The limit of the whole process, whose workers wait for one another if they need more."""

_log = logging.getLogger("bexp.workers")


def build_workers(
    profilers: Mapping[str, DeviceProfiler], database_url: str, settings: WorkerSettings, name: str = ""
) -> list[JobWorker]:
    """Return a worker for each profiler, by the name of its device. With a `name` they run only the jobs for it.

    Raises:
        ValueError: the database's URL, or the file of a local target, cannot be used.
        OSError: a file cannot be opened.
    """
    database = open_database(database_url, database_limits(len(profilers)))
    return [_worker(database, device, profiler, settings, name) for device, profiler in profilers.items()]


def run_workers(workers: Sequence[JobWorker], max_jobs: int | None, own_job_id: str | None = None) -> int:
    """Bring the schema up to date and serve jobs until all workers have ended; return the exit status."""
    database = workers[0].database
    try:
        _upgrade(database)
        return serve_workers(workers, max_jobs, own_job_id=own_job_id)
    except sa.exc.SQLAlchemyError as error:
        _log.error("the database cannot be used: %s", describe_trouble(error))
        return SERVICE_FAILED
    except OSError as error:  # the lock for an upgrade lies next to a SQLite file
        _log.error("the database cannot be opened: %s: %s", error.strerror, error.filename)
        return SERVICE_FAILED
    finally:
        database.dispose()


def database_limits(num_workers: int) -> DatabaseLimits:
    """Return the limits of a process with so many workers; one connection more listens for queued jobs."""
    return DatabaseLimits(max_connections=min(MAX_CONNECTIONS, CONNECTIONS_OF_A_WORKER * num_workers + 1))


def _upgrade(database: Database) -> None:
    """Bring the schema up to date. While another process holds SQLite's lock, such as a frozen one, this waits."""
    while True:
        try:
            return upgrade(database)
        except (sa.exc.OperationalError, Timeout) as error:
            reason = str(error).splitlines()[0]
            if "database is locked" not in reason and not isinstance(error, Timeout):
                raise
            _log.warning("another process keeps the database locked; waiting for it: %s", reason)


def _worker(
    database: Database, device: str, profiler: DeviceProfiler, settings: WorkerSettings, name: str
) -> JobWorker:
    options: dict[str, Any] = {"name": name}
    if isinstance(profiler, ReplayProfiler):
        options["explore"] = partial(explore, clock=profiler.clock)
        if not name:
            options["job_ids"] = AnswerableJobs(database, profiler.recording)
    elif settings.local_target is not None:
        file = Path(settings.local_target).name
        local = {name_local_target(settings.local_target): file, LOCAL: file}
        options["targets"] = installed_targets() | local
    queue = Queue(database, settings.queue)
    poll, wait = settings.max_poll.total_seconds(), settings.device_wait.total_seconds()
    return JobWorker(queue, profiler, device, max_poll_seconds=poll, device_wait_seconds=wait, **options)


def serve_workers(workers: Sequence[JobWorker], max_jobs: int | None, *, own_job_id: str | None = None) -> int:
    """Run each worker in a thread until all have ended; return SERVICE_FAILED if the device of any failed.

    With `own_job_id` they end with that job.
    """
    ending = threading.Event()
    failed = threading.Event()
    is_signalled = False

    def run(worker: JobWorker) -> None:
        try:
            worker.run(max_jobs=max_jobs)
        except (ProfilerError, DeviceBusyError, NewerSchemaError, *DATABASE_TROUBLE) as error:
            _log.error("worker %s ends: %s", worker.id, error)
            failed.set()
        except Exception:  # noqa: BLE001 - the exit status must say so, or nobody starts the worker again
            _log.exception("worker %s ends", worker.id)
            failed.set()

    def end(*_: object) -> None:
        nonlocal is_signalled
        for number in (signal.SIGTERM, signal.SIGINT):  # a second signal ends the process at once
            signal.signal(number, signal.SIG_DFL)
        is_signalled = True  # not an event, whose lock this thread may hold just now

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    listener = listen(workers)
    threads = [threading.Thread(target=run, args=(worker,), name=worker.id) for worker in workers]
    for thread in threads:
        thread.start()
    own = None if own_job_id is None else OwnJob(workers[0], own_job_id)
    for watch in () if own is None else (own.watch, own.end_with_stdin):
        threading.Thread(target=watch, args=(ending,), daemon=True).start()
    while any(thread.is_alive() for thread in threads) and not is_signalled and not ending.wait(0.1):
        pass
    ending.set()
    for worker in workers:
        worker.stop()  # all at once, since each may take a while
    for worker, thread in zip(workers, threads, strict=True):
        while thread.is_alive():
            thread.join(1.0)
            worker.stop()  # again, because a profiler that was starting may have missed it
    listener.close()
    return SERVICE_FAILED if failed.is_set() or (own is not None and own.is_refused) else 0


def listen(workers: Sequence[JobWorker]) -> Listener:
    """Notify the workers of queued jobs from now on."""

    def notice(_: str | None) -> None:
        for worker in workers:
            worker.notice()

    listener = Listener(workers[0].database, QUEUED_JOBS, notice)
    for worker in workers:
        worker.rely_on(listener)
    listener.start()
    return listener


CHECK_SECONDS = 0.3
KEEP_SECONDS = OWN_WORKER_TERM.total_seconds() / 6
PATIENCE_SECONDS = 2.0
"""So long another idle worker may take to claim the job or to give the device back, before the job's log says so."""
CLAIM_SECONDS = 10.0
"""So long a ready worker may leave its only job unclaimed."""
CANCEL_SECONDS = 6.0


class OwnJob:
    """The watch over the only job of `worker`, which may be submitted later. The job is kept while the worker lives.

    `is_refused` says that the worker was ready and did not take the job, so that it never will. A job that was resumed
    while another worker had it belongs to this worker as soon as the job waits for one.
    """

    def __init__(self, worker: JobWorker, job_id: str) -> None:
        self.is_refused = False
        self._worker = worker
        self._queue = Queue(worker.database)
        self._job_id = job_id
        self._is_told = False

    def watch(self, ending: threading.Event) -> None:
        """Set `ending` once the job has ended, or if the worker is ready and does not claim it."""
        queued_at = ready_at = math.inf
        kept_at = -math.inf
        while not ending.wait(CHECK_SECONDS):
            with suppress(JobNotFoundError, *DATABASE_TROUBLE):
                job, now = get_summary(self._queue.database, self._job_id), time.monotonic()
                if kept_at + KEEP_SECONDS <= now:
                    keep_job(self._queue.database, self._job_id, self._worker.name)
                    kept_at = now
                is_ours = job.state is JobState.QUEUED and job.own_worker == self._worker.name
                queued_at = min(queued_at, now) if is_ours else math.inf
                if job.state.is_final:
                    ending.set()
                elif not is_ours:
                    ready_at = math.inf
                elif self._worker.hardware is None or self._worker.device_held is not None:
                    ready_at = math.inf
                    self._tell(now - queued_at)
                elif (ready_at := min(ready_at, now)) + CLAIM_SECONDS < now:
                    self._refuse(self._worker.hardware)
                    ending.set()

    def end_with_stdin(self, ending: threading.Event) -> None:
        """Wait until stdin is closed: nobody waits any more. Then cancel the job, unless another worker has it."""
        with suppress(OSError, ValueError):
            while os.read(sys.stdin.fileno(), 4096):  # sys.stdin would still hold its lock when the process ends
                pass
        deadline = time.monotonic() + CANCEL_SECONDS
        while time.monotonic() < deadline and not ending.is_set():
            with suppress(*DATABASE_TROUBLE):
                try:
                    job = self._queue.request_cancel(self._job_id, own_worker=self._worker.name)
                    if job.state.is_final or job.own_worker != self._worker.name:
                        break
                except JobNotFoundError:
                    break
            time.sleep(CHECK_SECONDS)
        ending.set()

    def _tell(self, waited_seconds: float) -> None:
        held = self._worker.device_held
        if held is not None and not self._is_told and waited_seconds > PATIENCE_SECONDS:
            advice = "wait for its end, end it, or name another device with --device"
            note_reason(self._queue.database, self._job_id, f"{DEVICE_HELD}: {held}; {advice}")
            self._is_told = True

    def _refuse(self, hardware: HardwareSpec) -> None:
        reason = find_reason(self._queue.database, self._job_id)
        why = "" if reason is None else f": it {reason.removeprefix(OWN_WORKER)}"
        _log.error("the worker cannot run this exploration%s; the worker has %s", why, hardware.describe())
        self.is_refused = True


_PAGE = 50


class AnswerableJobs:
    """The ids of the waiting jobs that a table can answer. Each iteration reads the queue, and each request once."""

    def __init__(self, database: Database, recording: Recording) -> None:
        self._database = database
        self._recording = recording
        self._known: dict[str, bool] = {}

    def __iter__(self) -> Iterator[str]:
        waiting = list_waiting_ids(self._database, BEXP)
        self._known = {job_id: self._known[job_id] for job_id in waiting if job_id in self._known}
        new = [job_id for job_id in waiting if job_id not in self._known][:_PAGE]
        for job_id, request in read_requests(self._database, new).items() if new else ():
            self._known[job_id] = self._can_answer(job_id, request)
        return iter([job_id for job_id, answerable in self._known.items() if answerable])

    def _can_answer(self, job_id: str, request: ExplorationRequest | None) -> bool:
        reason = "its request cannot be read" if request is None else mismatch(request, self._recording)
        if reason is not None:
            _log.info("exploration %s is left to other workers: %s", job_id, reason)
        return reason is None
