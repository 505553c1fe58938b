"""The entry of a worker in the list of those that are alive."""

from __future__ import annotations

import logging
import threading
from types import TracebackType
from typing import Self

import sqlalchemy as sa

from bexp.storage.database import Database, describe_trouble
from bexp.storage.workers import LIVE_WITHIN, WorkerInfo, forget_worker, register_worker

_log = logging.getLogger(__name__)


class Registration:
    """Enters a worker in the list once `tell` is called, and renews the entry in a thread. Leaving the context ends it.

    While the database is away, the worker goes on, and the thread enters it later.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
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
                register_worker(self._database, self._worker)
            except sa.exc.SQLAlchemyError as error:
                reason = describe_trouble(error)
                _log.warning("worker %s could not report to the database: %s", self._worker.id, reason)
