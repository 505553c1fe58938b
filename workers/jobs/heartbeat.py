"""Renews the lease of a running job, and says when the job must stop."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from enum import StrEnum
from types import TracebackType
from typing import Self, TypeVar

import sqlalchemy as sa

from bexp.storage.leases import Lease, LeaseLostError
from bexp.storage.queue import Queue

_log = logging.getLogger(__name__)

POLL = timedelta(seconds=0.5)

T = TypeVar("T")


class Interruption(StrEnum):
    """The reason why a job must not go on."""

    CANCELLED = "cancelled"
    LEASE_LOST = "lease lost"


class LeaseHeartbeat:
    """A thread that extends the lease three times in its duration, and checks for a cancellation every `poll`.

    The thread calls `interrupt` once if the job is cancelled or the lease is lost; `reason` then says which. While the
    database does not answer, the thread goes on trying. Nobody can claim the job meanwhile, and if somebody claims it
    before this worker writes again, the writes are refused.
    """

    def __init__(self, queue: Queue, lease: Lease, interrupt: Callable[[], None], *, poll: timedelta = POLL) -> None:
        self.reason: Interruption | None = None
        self._queue = queue
        self._lease = lease
        self._interrupt = interrupt
        self._poll_seconds = poll.total_seconds()
        self._lease_seconds = queue.settings.lease.total_seconds()
        self._ended = threading.Event()
        self._asking = threading.Lock()
        self._extended_at = time.monotonic()
        self._thread = threading.Thread(target=self._keep, name=f"lease-{lease.job_id}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def end(self, write: Callable[[], T]) -> T:
        """Return the result of `write`, after which the lease is given up, and is not reported as lost."""
        with self._asking:
            written = write()
            self._ended.set()
        return written

    def _keep(self) -> None:
        while not self._ended.wait(self._poll_seconds):
            with self._asking:
                reason = None if self._ended.is_set() else self._ask()
            if reason is not None:
                self._stop(reason)
                return

    def _ask(self) -> Interruption | None:
        """Extend the lease if it is time, and return why the job must not go on."""
        now = time.monotonic()
        try:
            if now - self._extended_at >= self._lease_seconds / 3:
                status = self._queue.heartbeat(self._lease)
                self._extended_at = now
            else:
                status = self._queue.watch(self._lease)
        except LeaseLostError:
            return Interruption.LEASE_LOST
        except sa.exc.SQLAlchemyError as error:
            reason = str(error).splitlines()[0]
            _log.warning("the lease of %s could not be extended: %s", self._lease.job_id, reason)
            return None
        return Interruption.CANCELLED if status.cancel_requested else None

    def _stop(self, reason: Interruption) -> None:
        self.reason = reason
        self._interrupt()
