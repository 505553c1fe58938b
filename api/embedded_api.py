"""The API as a child of a command: `python -m bexp.api.embedded_api FD [with-worker]`, where FD is an inherited socket.

The database comes from the environment. The command writes the ids of its explorations, one a line, to the child's
stdin. The child ends on SIGTERM; when stdin closes, because the command was killed, it first cancels the explorations
that have not ended, because nobody waits for them any more. After an id may stand how the id of the command's worker
begins: the exploration is then left alone while another worker runs it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

from sqlalchemy.exc import SQLAlchemyError

from bexp.api.serve import serve_on
from bexp.api.settings import ServiceSettings, read_environment
from bexp.storage.database import Database, describe_trouble, open_database
from bexp.storage.jobs import JobNotFoundError
from bexp.storage.queue import Queue
from bexp.storage.schema import upgrade
from bexp.storage.workers import is_run_by_another

CANCEL_SECONDS = 6.0
NEVER = 1e9
WRONG_USAGE, SERVICE_FAILED = 2, 3  # as the worker ends with them


def main(listener: socket.socket, *, with_worker: bool) -> None:
    """Serve on the listening socket until told to end.

    A command that starts a worker of its own watches it itself: no job needs to be told that it waits for one.
    """
    database = _open_database()
    try:
        threading.Thread(target=_end_with_parent, args=(database,), name="parent", daemon=True).start()
        settings = ServiceSettings(database.url)
        own_worker = replace(settings, waiting_check_seconds=NEVER, takes_local_target=True)
        serve_on(listener, own_worker if with_worker else settings)
    finally:
        database.dispose()


def _open_database() -> Database:
    """Return the database with its tables up to date; end this process with a sentence if there is none."""
    try:
        database = open_database(read_environment().database_url)
        upgrade(database)
    except ValueError as error:
        _end(WRONG_USAGE, str(error))
    except OSError as error:
        _end(SERVICE_FAILED, f"the database cannot be opened: {error.strerror}: {error.filename}")
    except SQLAlchemyError as error:
        _end(SERVICE_FAILED, f"the database cannot be used: {describe_trouble(error)}")
    return database


def _end(status: int, sentence: str) -> NoReturn:
    sys.stderr.write(f"{sentence}\n")
    sys.exit(status)


def _end_with_parent(database: Database) -> None:
    open_jobs = [line.partition(" ") for line in sys.stdin.read().splitlines()]
    queue = Queue(database)
    deadline = time.monotonic() + CANCEL_SECONDS
    while open_jobs and time.monotonic() < deadline:
        with suppress(SQLAlchemyError):  # without its end this process would stay for ever
            open_jobs = [job for job in open_jobs if not is_settled(queue, job[0], job[2])]
        time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGTERM)


def is_settled(queue: Queue, job_id: str, own_prefix: str = "") -> bool:
    """Cancel an exploration; return whether it has ended, or another worker than the command's own runs it."""
    try:
        if own_prefix and is_run_by_another(queue.database, job_id, own_prefix):
            return True
        if queue.request_cancel(job_id).state.is_final:
            return True
    except JobNotFoundError:
        return True
    queue.note_waiting()  # ends the job if its worker has put it back meanwhile
    return False


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), with_worker="with-worker" in sys.argv[2:])
