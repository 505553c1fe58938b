"""Processes that begin to work with one database at once, forked from one that has imported what they need."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta

from bexp.storage.database import Database, open_database
from bexp.storage.queue import Queue
from bexp.storage.queue_settings import QueueSettings
from bexp.storage.schema import is_current, upgrade
from bexp.storage.workers import WorkerInfo
from tests.chaos.fork_server import shared_server
from tests.waits import PATIENCE_SECONDS

IMPORTED = (
    "alembic.command",
    "bexp.storage.queue",
    "bexp.storage.schema",
    "psycopg",
    "sqlalchemy.dialects.postgresql.psycopg",
    "sqlalchemy.dialects.sqlite.pysqlite",
)


def drain(database: Database, owner: str) -> None:
    """Claim jobs, and print their ids."""
    queue = Queue(database, QueueSettings(lease=timedelta(hours=1)))
    for _ in range(60):
        claim = queue.claim(WorkerInfo(owner, "host", 1, "cpu", "A device", 1, "f", 1, 1, {"bexp": ""}))
        if claim is not None:
            sys.stdout.write(f"{claim.job.id}\n")


def bring_up_to_date(database: Database, _: str) -> None:
    """Upgrade the schema."""
    upgrade(database)
    assert is_current(database)


WORK: dict[str, Callable[[Database, str], None]] = {work.__name__: work for work in (drain, bring_up_to_date)}


def run_two(work: Callable[[Database, str], None], url: str) -> list[str]:
    """Let two processes do `work`; return the words that they print.

    Raises AssertionError, with what they printed, if one of them fails.
    """
    (gate, opener), (told, ready) = os.pipe(), os.pipe()
    with tempfile.TemporaryFile("w+") as printed:
        processes = [
            shared_server(*IMPORTED).start(
                __name__,
                *(work.__name__, url, owner, str(gate), str(ready)),
                output=printed.fileno(),
                descriptors=(gate, ready),
            )
            for owner in "ab"
        ]
        os.close(gate)
        os.close(ready)
        are_ready = all(os.read(told, 1) for _ in processes)
        os.close(opener)
        codes = [process.wait(PATIENCE_SECONDS) for process in processes]
        os.close(told)
        printed.seek(0)
        text = printed.read()
    assert are_ready, text
    assert codes == [0, 0], text
    return text.split()


def main() -> None:
    """Do the work once the gate is open."""
    work, url, owner, gate, ready = sys.argv[1:]
    database = open_database(url)
    os.write(int(ready), b"r")
    os.close(int(ready))  # once nobody has it open, who waits for both learns that one has failed
    os.read(int(gate), 1)
    WORK[work](database, owner)
    database.dispose()


if __name__ == "__main__":
    main()
