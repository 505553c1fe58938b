"""The background work of the service: each task is restarted when it fails, and its health can be asked for.

One writes the log files of explorations. Another does what one process does for all on a database: it notes why jobs
wait, and applies retention.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from anyio.to_thread import run_sync
from sqlalchemy.exc import SQLAlchemyError

from bexp.api.run_log import RunLog, log_path
from bexp.api.settings import ServiceSettings
from bexp.storage.audit import prune_audit, prune_most_recorded
from bexp.storage.database import Database
from bexp.storage.events import read_events, read_last_seqs
from bexp.storage.jobs import JobNotFoundError, get_job
from bexp.storage.leaders import HOUSEKEEPER, give_up_role, hold_role
from bexp.storage.pruning import find_prunable, prune
from bexp.storage.queue import Queue
from bexp.storage.schema import NewerSchemaError, is_of_later_version

RESTART_SECONDS = 1.0
SILENCE_SECONDS = 10.0
"""A task counts as stuck if it has finished no round for its interval and this time."""

Beat = Callable[[], None]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Task:
    name: str
    interval_seconds: float
    last_round: float = field(default_factory=time.monotonic)
    fault: str | None = None

    def beat(self) -> None:
        self.last_round = time.monotonic()
        self.fault = None


class Supervisor:
    """Runs tasks until it is closed. A task gets a function to call after each successful round."""

    def __init__(self, *, restart_seconds: float = RESTART_SECONDS) -> None:
        self._restart_seconds = restart_seconds
        self._tasks: list[_Task] = []
        self._running: list[asyncio.Task[None]] = []
        self._is_closed = False

    def start(self, name: str, run: Callable[[Beat], Awaitable[None]], *, interval_seconds: float) -> None:
        """Run `run` from now on; it should finish a round every `interval_seconds`."""
        task = _Task(name, interval_seconds)
        self._tasks.append(task)
        self._running.append(asyncio.create_task(self._keep_running(task, run)))

    def find_trouble(self) -> str | None:
        """Return the trouble of the first task that does not do its work, or None if all do."""
        now = time.monotonic()
        for task in self._tasks:
            if task.fault is not None:
                return f"the background task '{task.name}' failed: {task.fault}"
            silence = now - task.last_round
            if silence > task.interval_seconds + SILENCE_SECONDS:
                return f"the background task '{task.name}' has not finished a round for {silence:.0f} s"
        return None

    async def close(self) -> None:
        """End all tasks."""
        self._is_closed = True
        for running in self._running:
            running.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _keep_running(self, task: _Task, run: Callable[[Beat], Awaitable[None]]) -> None:
        while True:
            try:
                await run(task.beat)
                task.fault = "it ended"
            except Exception as error:  # whatever ends a task, it is started again
                task.fault = type(error).__name__
                again = "" if self._is_closed else " and is started again"
                logger.warning("the background task '%s' failed%s", task.name, again, exc_info=error)
            if self._is_closed:  # an exception while a task ends replaces its cancellation
                return
            await asyncio.sleep(self._restart_seconds)


WRITE_SECONDS = 2.0


class LogFolder:
    """Appends new events of all explorations to their log files."""

    def __init__(self, database: Database, directory: Path) -> None:
        self._database = database
        self._directory = directory
        self._written: defaultdict[str, int] = defaultdict(int)
        """The last event in the file of each exploration."""

    async def run(self, beat: Beat) -> None:
        """Write until cancelled; `beat` is called after each round."""
        while True:
            await run_sync(self.write)
            beat()
            await asyncio.sleep(WRITE_SECONDS)

    def write(self) -> None:
        """Write the new events.

        Raises:
            OSError: a file cannot be written, though the others have been.
            sqlalchemy.exc.SQLAlchemyError: the database does not answer.
        """
        trouble: OSError | None = None
        for job_id, last in read_last_seqs(self._database).items():
            if last > self._written[job_id]:
                try:
                    self._append(job_id)
                except OSError as error:
                    trouble = error
        if trouble is not None:
            raise trouble

    def _append(self, job_id: str) -> None:
        try:
            job = get_job(self._database, job_id)
        except JobNotFoundError:  # it was deleted meanwhile
            return
        mode = "train" if job.request is None else job.request.mode
        with RunLog(log_path(self._directory, mode, job.model_name, job_id)) as file:
            after = self._written[job_id]
            while file.is_writing and (events := read_events(self._database, job_id, after=after)):
                for event in events:
                    file.write(event)
                after = self._written[job_id] = events[-1].seq


TERM = timedelta(seconds=10)
"""A housekeeper that is silent for so long is replaced at the next check of another process."""

PRUNE_SECONDS = 300.0
MOST_PRUNED = 200
"""The most jobs, and records of the audit, that one round deletes, so that it stays short; the next round goes on."""


class Housekeeper:
    """Does the work whenever this process holds the role, and hands the role on when it ends."""

    def __init__(self, queue: Queue, settings: ServiceSettings) -> None:
        self.id = f"{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(2)}"
        self._queue = queue
        self._settings = settings
        self._is_elected = False
        self._prunes_at = 0.0
        self.is_outdated = False
        """Whether a later version of this program had upgraded the database at the last round."""

    async def run(self, beat: Beat) -> None:
        """Work until cancelled; `beat` is called after each round that went well."""
        try:
            while True:
                try:
                    await run_sync(self.work)
                    beat()
                except NewerSchemaError as error:
                    logger.warning("the service takes no changes: %s", error)
                except SQLAlchemyError as error:
                    logger.warning("the database does not answer: %s", getattr(error, "orig", error))
                await asyncio.sleep(self._settings.waiting_check_seconds)
        finally:
            if self._is_elected:
                with suppress(SQLAlchemyError):
                    await asyncio.to_thread(give_up_role, self._queue.database, HOUSEKEEPER, self.id)

    def work(self) -> bool:
        """Do what is due if this process is the housekeeper; return whether it is.

        Raises:
            NewerSchemaError: a later version of this program has upgraded the database, and does the work.
            sqlalchemy.exc.SQLAlchemyError: the database does not answer.
        """
        with self._queue.database.read() as connection:
            self.is_outdated = is_of_later_version(connection)
        if self.is_outdated:
            raise NewerSchemaError
        self._is_elected = hold_role(self._queue.database, HOUSEKEEPER, self.id, TERM)
        if not self._is_elected:
            return False
        self._queue.note_waiting(max_wait=timedelta(seconds=self._settings.max_wait_seconds))
        if time.monotonic() >= self._prunes_at and not self._prune():
            self._prunes_at = time.monotonic() + PRUNE_SECONDS
        return True

    def _prune(self) -> bool:
        """Delete some of the jobs and records that are not kept; return whether more remain."""
        database, days = self._queue.database, self._settings.keep_days
        num_records = prune_audit(database, at_most=MOST_PRUNED) or prune_most_recorded(database, at_most=MOST_PRUNED)
        if self._settings.keeps_all:
            return num_records == MOST_PRUNED
        older_than = None if days is None else timedelta(days=days)
        prunable = find_prunable(database, older_than=older_than, keep=self._settings.keep_jobs)
        if prunable:
            prune(database, prunable[:MOST_PRUNED])
            logger.warning("retention deleted %d finished explorations", len(prunable[:MOST_PRUNED]))
        return len(prunable) > MOST_PRUNED or num_records == MOST_PRUNED
