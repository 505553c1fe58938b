"""The work of one API process for all on a database: it notes why jobs wait, and applies retention."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from contextlib import suppress
from datetime import timedelta

from anyio.to_thread import run_sync
from sqlalchemy.exc import SQLAlchemyError

from bexp.api.background import Beat
from bexp.api.settings import ServiceSettings
from bexp.storage.audit import prune_audit, prune_most_recorded
from bexp.storage.leaders import HOUSEKEEPER, give_up_role, hold_role
from bexp.storage.pruning import find_prunable, prune
from bexp.storage.queue import Queue
from bexp.storage.schema import NewerSchemaError, is_of_later_version

TERM = timedelta(seconds=10)
"""A housekeeper that is silent for so long is replaced at the next check of another process."""

PRUNE_SECONDS = 300.0
MOST_PRUNED = 200
"""The most jobs, and records of the audit, that one round deletes, so that it stays short; the next round goes on."""

logger = logging.getLogger(__name__)


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
