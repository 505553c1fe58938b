"""A worker for one job: it ends with the job, or when nobody waits for it any more."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from contextlib import suppress

from bexp.explorer.model.hardware import HardwareSpec
from bexp.storage.database import DATABASE_TROUBLE
from bexp.storage.jobs import JobNotFoundError, JobState, get_summary
from bexp.storage.matching import OWN_WORKER, OWN_WORKER_TERM, keep_job
from bexp.storage.queue import Queue
from bexp.storage.waiting import DEVICE_HELD, find_reason, note_reason
from bexp.workers.jobs.worker import JobWorker

CHECK_SECONDS = 0.3
KEEP_SECONDS = OWN_WORKER_TERM.total_seconds() / 6
PATIENCE_SECONDS = 2.0
"""So long another idle worker may take to claim the job or to give the device back, before the job's log says so."""
CLAIM_SECONDS = 10.0
"""So long a ready worker may leave its only job unclaimed."""
CANCEL_SECONDS = 6.0

_log = logging.getLogger(__name__)


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
        """Log why the job is not claimed."""
        reason = find_reason(self._queue.database, self._job_id)
        why = "" if reason is None else f": it {reason.removeprefix(OWN_WORKER)}"
        _log.error("the worker cannot run this exploration%s; the worker has %s", why, hardware.describe())
        self.is_refused = True
