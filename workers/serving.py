"""Workers that run in one process: opening the database, a worker for each profiler, and their threads."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from filelock import Timeout

from bexp.explorer.model.target import LOCAL, name_local_target
from bexp.explorer.search.explore import explore
from bexp.storage.database import DATABASE_TROUBLE, Database, DatabaseLimits, describe_trouble, open_database
from bexp.storage.notifications import QUEUED_JOBS, Listener
from bexp.storage.queue import Queue
from bexp.storage.schema import NewerSchemaError, upgrade
from bexp.targets.registry import installed_targets
from bexp.workers.devices.lock import DeviceBusyError
from bexp.workers.jobs.own_job import OwnJob
from bexp.workers.jobs.worker import JobWorker
from bexp.workers.process.interface import DeviceProfiler, ProfilerError
from bexp.workers.replay.answerable import AnswerableJobs
from bexp.workers.replay.profiler import ReplayProfiler
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
