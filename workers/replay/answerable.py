"""The jobs that a recorded table can answer. A worker that replays the table leaves other jobs to other workers."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from bexp.explorer.model.target import BEXP
from bexp.explorer.request.request import ExplorationRequest
from bexp.storage.database import Database
from bexp.storage.waiting import list_waiting_ids, read_requests
from bexp.workers.replay.profiler import mismatch
from bexp.workers.replay.recording import Recording

_PAGE = 50

_log = logging.getLogger(__name__)


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
