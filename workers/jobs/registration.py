"""The entry of a worker in the list of live workers."""

from __future__ import annotations

import logging
import threading
from datetime import timedelta
from types import TracebackType
from typing import Self

import sqlalchemy as sa

from bexp.storage.database import DATABASE_TROUBLE, Database
from bexp.storage.workers import LIVE_WITHIN, WorkerInfo, forget_worker, register_worker, worker_heartbeat

_log = logging.getLogger(__name__)


class Registration:
    """Registers a worker, and renews the entry in a thread. Leaving the context removes the entry."""

    def __init__(self, database: Database, worker: WorkerInfo, *, every: timedelta = LIVE_WITHIN / 3) -> None:
        self._database = database
        self._worker = worker
        self._every_seconds = every.total_seconds()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"registration-{worker.id}", daemon=True)

    def __enter__(self) -> Self:
        try:
            register_worker(self._database, self._worker)
        except DATABASE_TROUBLE as trouble:  # the thread does it later
            _log.warning("worker %s is not in the list yet: %s", self._worker.id, str(trouble).splitlines()[0])
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
            _log.warning("worker %s could not be removed from the list: %s", self._worker.id, trouble)

    def _beat(self) -> None:
        while not self._ended.wait(self._every_seconds):
            try:
                if not worker_heartbeat(self._database, self._worker.id):
                    register_worker(self._database, self._worker)
            except sa.exc.SQLAlchemyError as error:
                reason = str(error).splitlines()[0]
                _log.warning("worker %s could not report to the database: %s", self._worker.id, reason)
