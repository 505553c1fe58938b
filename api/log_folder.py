"""The log files of a service: one for each exploration, in a folder that its operator names."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

from anyio.to_thread import run_sync

from bexp.api.background import Beat
from bexp.api.run_log import RunLog, log_path
from bexp.storage.database import Database
from bexp.storage.events import read_events, read_last_seqs
from bexp.storage.jobs import JobNotFoundError, get_job

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
