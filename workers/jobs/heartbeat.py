"""Extends a job's lease while it runs, and stops the profiler if the job must not go on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from enum import StrEnum
from types import TracebackType
from typing import Self

import sqlalchemy as sa

from storage.leases import Lease, LeaseLostError
from storage.queue import Queue

POLL = timedelta(seconds=0.5)

_log = logging.getLogger(__name__)


class Interruption(StrEnum):
    """Why a job must not go on."""

    CANCELLED = "cancelled"
    LEASE_LOST = "lease lost"


class LeaseHeartbeat:
    """A thread that extends the lease three times in its duration, and checks for a cancellation every `poll`.

    It calls `interrupt` once if the job is cancelled or the lease is lost; `reason` then says which. While the database
    does not answer it goes on trying: nobody can claim the job meanwhile, and what the job writes later is refused if
    somebody has claimed it.
    """

    def __init__(self, queue: Queue, lease: Lease, interrupt: Callable[[], None], *, poll: timedelta = POLL) -> None:
        self.reason: Interruption | None = None
        self._queue = queue
        self._lease = lease
        self._interrupt = interrupt
        self._poll_seconds = poll.total_seconds()
        self._lease_seconds = queue.settings.lease.total_seconds()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"lease-{lease.job_id}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _keep(self) -> None:
        extended_at = time.monotonic()
        while not self._ended.wait(self._poll_seconds):
            now = time.monotonic()
            try:
                if now - extended_at >= self._lease_seconds / 3:
                    status = self._queue.heartbeat(self._lease)
                    extended_at = now
                else:
                    status = self._queue.watch(self._lease)
            except LeaseLostError:
                self._stop(Interruption.LEASE_LOST)
                return
            except sa.exc.SQLAlchemyError as error:
                reason = str(error).splitlines()[0]
                _log.warning("the lease of %s could not be extended: %s", self._lease.job_id, reason)
                continue
            if status.cancel_requested:
                self._stop(Interruption.CANCELLED)
                return

    def _stop(self, reason: Interruption) -> None:
        self.reason = reason
        self._interrupt()
