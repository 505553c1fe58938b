"""`python -m bexp.workers` runs a worker; with `doctor` it tells which devices a worker could use here."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from filelock import Timeout

from bexp.explorer.search.explore import explore
from bexp.explorer.spec.target import LOCAL, name_local_target
from bexp.storage.database import DATABASE_TROUBLE, Database, DatabaseLimits, describe_trouble, open_database
from bexp.storage.notifications import QUEUED_JOBS, Listener
from bexp.storage.queue import Queue
from bexp.storage.schema import NewerSchemaError, upgrade
from bexp.target_registry import installed_targets
from bexp.workers.devices.discovery import visible_devices
from bexp.workers.devices.lock import DeviceBusyError
from bexp.workers.devices.selection import default_devices, parse_counts, parse_devices
from bexp.workers.doctor import main as diagnose
from bexp.workers.jobs.own_job import OwnJob
from bexp.workers.jobs.worker import Worker
from bexp.workers.process.interface import DeviceProfiler, ProfilerError
from bexp.workers.process.profiler import Profiler
from bexp.workers.ray.pool import RayDevicePool
from bexp.workers.replay.answerable import AnswerableJobs
from bexp.workers.replay.profiler import PREFIX, ReplayProfiler
from bexp.workers.settings import Settings, read_settings

SERVICE_FAILED = 3
"""The exit status if the database or a device cannot be used. argparse exits with 2 on wrong usage."""

CONNECTIONS_OF_A_WORKER = 3
"""A busy worker uses so many at once: for its steps, its lease and its entry in the list."""

MAX_CONNECTIONS = 10
"""Of the whole process, whose workers wait for one another if they have more devices than that suffices for."""

_log = logging.getLogger("bexp.workers")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bexp.workers", description="Claim explorations and run them.")
    commands = parser.add_subparsers(dest="command", metavar="doctor")
    doctor = commands.add_parser("doctor", help="show which devices and back ends can be used, and why others cannot")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--device",
        help="cpu, cuda:0, cuda:0-3 or replay:TABLE (a recorded table); default: the first GPU, else the CPU",
    )
    parser.add_argument(
        "--group",
        action="store_true",
        help="one worker for all of the devices (cuda:0-3, or cpu,cpu for two processes on the CPU), for jobs whose "
        "devices share sequences; without --device all GPUs; default: one worker per device",
    )
    parser.add_argument(
        "--num-devices",
        metavar="N[,N...]",
        help="without --device: use this number of GPUs, or the largest of several numbers that the host has; "
        "default: one, with --group all",
    )
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="run trials on all devices of a Ray cluster (auto: the cluster of this host); --device then says what a "
        "trial needs: cpu, cuda:0, or cuda:0-3 for four GPUs of a host; default: one GPU",
    )
    parser.add_argument("--database-url", help="default: BEXP_DATABASE_URL, else a SQLite file of this user")
    parser.add_argument("--max-jobs", type=int, metavar="N", help="end after N jobs on each device")
    parser.add_argument(
        "--job",
        metavar="ID",
        help="run this exploration alone, and end with it; it is cancelled when standard input is closed",
    )
    options = parser.parse_args(arguments)
    if options.max_jobs is not None and options.max_jobs < 1:
        parser.error("--max-jobs must be at least 1")
    if options.group and options.ray is not None:
        parser.error("--group and --ray exclude each other: on a cluster --device says what a trial needs")
    if options.num_devices is not None and (options.device is not None or options.ray is not None):
        parser.error("--num-devices chooses among the GPUs of this host where neither --device nor --ray does")
    if options.command == "doctor":
        return diagnose(options.json)

    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    _log.setLevel(logging.INFO)
    try:
        settings = read_settings()
        job_ids = None if options.job is None else [options.job]
        url = options.database_url or settings.database_url
        if options.ray is not None:
            database = open_database(url, database_limits(1))
            workers = [_build_cluster_worker(database, options.ray, options.device, settings, job_ids)]
        else:
            devices = _devices(options.device, options.num_devices, settings, group=options.group)
            database = open_database(url, database_limits(len(devices)))
            workers = [_build_worker(database, owned, settings, job_ids) for owned in devices]
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"a file cannot be opened: {error.strerror}: {error.filename}")
    try:
        _upgrade(database)
        return serve_workers(workers, options.max_jobs, own_job_id=options.job)
    except sa.exc.SQLAlchemyError as error:
        _log.error("the database cannot be used: %s", describe_trouble(error))
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


def _devices(
    given: str | None, num_devices: str | None, settings: Settings, *, group: bool
) -> tuple[tuple[str, ...], ...]:
    """The devices of each worker: one device each, or all devices in one worker if `group` is set."""
    if given is None:
        counts = None if num_devices is None else parse_counts(num_devices)
        found = default_devices(visible_devices(settings.environment), group=group, counts=counts)
    else:
        found = (given,) if given.startswith(PREFIX) else parse_devices(given)
    if group:
        return (found,)
    if len(set(found)) < len(found):
        raise ValueError(f"device '{given}' names a device twice, which only --group can use")
    return tuple((device,) for device in found)


def _build_worker(
    database: Database, devices: tuple[str, ...], settings: Settings, job_ids: list[str] | None
) -> Worker:
    if devices[0].startswith(PREFIX):
        replay = ReplayProfiler(Path(devices[0].removeprefix(PREFIX)))
        replayed = partial(explore, clock=replay.clock)
        chosen = AnswerableJobs(database, replay.recording) if job_ids is None else job_ids
        return _worker(database, replay, "replay", settings, explore=replayed, job_ids=chosen)

    def wait(reason: str) -> None:
        _log.info("waiting for the device: %s", reason)
        worker.device_held = reason

    profiler = Profiler(devices, environment=settings.environment, on_wait=wait)
    named = devices[0] if len(devices) == 1 else f"{devices[0]}+{len(devices) - 1}"
    targets = installed_targets()
    if settings.local_target is not None:
        file = Path(settings.local_target).name
        targets |= {name_local_target(settings.local_target): file, LOCAL: file}
    worker = _worker(database, profiler, named, settings, job_ids=job_ids, targets=targets)
    return worker


def _build_cluster_worker(
    database: Database, address: str, device: str | None, settings: Settings, job_ids: list[str] | None
) -> Worker:
    needed = ("cuda:0",) if device is None else parse_devices(device)
    return _worker(database, RayDevicePool(address, needed), f"ray-{needed[0]}", settings, job_ids=job_ids)


def _worker(database: Database, profiler: DeviceProfiler, device: str, settings: Settings, **options: Any) -> Worker:
    queue = Queue(database, settings.queue)
    return Worker(queue, profiler, device, max_poll_seconds=settings.max_poll.total_seconds(), **options)


def serve_workers(workers: Sequence[Worker], max_jobs: int | None, *, own_job_id: str | None = None) -> int:
    """Run each worker in a thread until all have ended; returns SERVICE_FAILED if the device of any failed.

    With `own_job_id` the first worker is there for that job alone.
    """
    ending = threading.Event()
    failed = threading.Event()

    def run(worker: Worker) -> None:
        try:
            worker.run(max_jobs=max_jobs)
        except (ProfilerError, DeviceBusyError, NewerSchemaError, *DATABASE_TROUBLE) as error:
            _log.error("worker %s ends: %s", worker.id, error)
            failed.set()
        except Exception:  # noqa: BLE001 - the exit status must say so, or nobody starts the worker again
            _log.exception("worker %s ends", worker.id)
            failed.set()

    def end(*_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):  # a second signal ends the process at once
            signal.signal(number, signal.SIG_DFL)
        ending.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    listener = listen(workers)
    threads = [threading.Thread(target=run, args=(worker,), name=worker.id) for worker in workers]
    for thread in threads:
        thread.start()
    own = None if own_job_id is None else OwnJob(workers[0], own_job_id)
    for watch in () if own is None else (own.watch, own.end_with_stdin):
        threading.Thread(target=watch, args=(ending,), daemon=True).start()
    while any(thread.is_alive() for thread in threads) and not ending.wait(0.1):
        pass
    for worker, thread in zip(workers, threads, strict=True):
        worker.stop()
        while thread.is_alive():
            thread.join(1.0)
            worker.stop()  # again, because a profiler that was starting may have missed it
    listener.close()
    return SERVICE_FAILED if failed.is_set() or (own is not None and own.is_refused) else 0


def listen(workers: Sequence[Worker]) -> Listener:
    """Tell the workers of queued jobs from now on."""

    def notice(_: str | None) -> None:
        for worker in workers:
            worker.notice()

    listener = Listener(workers[0].database, QUEUED_JOBS, notice)
    for worker in workers:
        worker.rely_on(listener)
    listener.start()
    return listener


if __name__ == "__main__":
    sys.exit(main())
