"""A primary that dies loses nothing that was confirmed: the replica that is promoted has it, and everything goes on."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest

from bexp.storage.database import DATABASE_TROUBLE, Database, DatabaseLimits, open_database
from bexp.storage.events import read_events
from bexp.storage.jobs import JobState, get_job
from bexp.storage.notifications import QUEUED_JOBS, Listener
from bexp.storage.queue import Queue
from bexp.storage.quotas import EVERYBODY, Quota, set_quota
from bexp.storage.schema import upgrade
from tests.contracts.jobs import ANSWER, claim_one, stored_trials
from tests.contracts.samples import make_progress, make_report, make_request, make_trial
from tests.waits import wait_until

USER = "pgserver" if os.geteuid() == 0 else None
"""PostgreSQL does not run as root."""


class Server:
    """A PostgreSQL server with a folder and a socket of its own."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # platformdirs, imported by pgserver, wants XDG_RUNTIME_DIR
            from pgserver import _commands as commands
            from pgserver.utils import ensure_user_exists
        self._commands = commands
        self.data, self.socket = folder / "data", folder / "socket"
        self.socket.mkdir(parents=True)
        if USER is not None:
            ensure_user_exists(USER)
            for each in (folder, self.socket):
                shutil.chown(each, USER)

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        options = f"-k {self.socket} -c listen_addresses= -c fsync=off -c full_page_writes=off"
        self._run("pg_ctl", ["--wait", "-o", options, "-l", str(self.data / "log"), "start"])

    def create(self) -> None:
        """Make an empty one."""
        self._run("initdb", ["--auth=trust", "--username=postgres", "--no-sync"])

    def copy(self, primary: Server) -> None:
        """Make a replica of another server, which it goes on to follow."""
        self._run("pg_basebackup", ["-h", str(primary.socket), "-U", "postgres", "-R", "-X", "stream", "-c", "fast"])

    def promote(self) -> None:
        """Make the replica a server that takes writes."""
        self._run("pg_ctl", ["--wait", "promote"])

    def kill(self) -> None:
        """End all of it at once, if it runs."""
        with suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int((self.data / "postmaster.pid").read_text().split()[0]), signal.SIGQUIT)

    def execute(self, statement: str) -> object:
        """Return the first value that a statement returns."""
        with psycopg.connect(host=str(self.socket), user="postgres", dbname="postgres", autocommit=True) as connection:
            cursor = connection.execute(statement)
            return next(iter(cursor.fetchone() or ()), None) if cursor.description else None

    def _run(self, command: str, arguments: list[str]) -> None:
        getattr(self._commands, command)(arguments, pgdata=self.data, user=USER)


@pytest.fixture
def servers() -> Iterator[tuple[Server, Server]]:
    """A primary, and a replica without which nothing is confirmed."""
    folder = Path(tempfile.mkdtemp(prefix="bexp-promotion-"))
    folder.chmod(0o711)
    primary, replica = Server(folder / "primary"), Server(folder / "replica")
    try:
        primary.create()
        primary.start()
        replica.copy(primary)
        replica.start()
        primary.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        primary.execute("SELECT pg_reload_conf()")
        wait_until(lambda: primary.execute("SELECT sync_state FROM pg_stat_replication") == "sync")
        yield primary, replica
    finally:
        primary.kill()
        replica.kill()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def opened(primary: Server, replica: Server) -> Iterator[Database]:
    """A database by a URL that names both, whichever takes writes."""
    url = f"postgresql://postgres@/postgres?host={primary.socket},{replica.socket}&target_session_attrs=read-write"
    database = open_database(url, DatabaseLimits())
    try:
        yield database
    finally:
        database.dispose()


def test_what_was_confirmed_is_there_and_the_job_goes_on(servers: tuple[Server, Server]) -> None:
    primary, replica = servers
    with opened(primary, replica) as database:
        upgrade(database)
        set_quota(database, EVERYBODY, Quota(max_queued=10_000))
        queue, told = Queue(database), threading.Event()
        running, _ = queue.enqueue(make_request())
        claim = claim_one(queue)
        queue.pin(claim.lease, make_report())
        seq = queue.record(claim.lease, make_progress(0))
        listener = Listener(database, QUEUED_JOBS, lambda message: told.set() if message is not None else None)
        listener.start()
        confirmed: list[str] = []
        ended = threading.Event()

        def submit() -> None:
            while not ended.is_set():
                with suppress(*DATABASE_TROUBLE):
                    confirmed.append(queue.enqueue(make_request(fresh=True))[0].id)

        client = threading.Thread(target=submit)
        client.start()
        try:
            wait_until(lambda: len(confirmed) > 20)
            primary.kill()
            before = len(confirmed)
            replica.promote()
            wait_until(lambda: len(confirmed) > before + 20)
            told.clear()
            wait_until(told.is_set)  # jobs are queued all the time
        finally:
            ended.set()
            client.join()
            listener.close()
        assert [get_job(database, job_id).state for job_id in confirmed] == [JobState.QUEUED] * len(confirmed)
        assert queue.record(claim.lease, make_progress(1), after_seq=seq) == seq + 1
        queue.finish(claim.lease, JobState.SUCCEEDED, answer=ANSWER)
        assert get_job(database, running.id).state is JobState.SUCCEEDED
        assert stored_trials(database, running.id) == [make_trial(0), make_trial(1)]
        assert [event.seq for event in read_events(database, running.id)] == list(range(1, 6))
