"""The databases of a campaign, and what can happen to them."""

from __future__ import annotations

import signal
import sqlite3
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import psutil

OUTAGE_SECONDS = ((0.5, 4.0), (0.5, 4.0), (7.0, 9.0))
"""Every third one is longer than any answer may take."""


class SqliteFile:
    """A file whose write lock is taken for some seconds, as by a process that is frozen within a transaction."""

    fault = "database_lock"

    def __init__(self, folder: Path) -> None:
        self.calm = threading.Event()
        self._path = folder / "bexp.db"
        self.url = f"sqlite:///{self._path}"

    def hurt(self, rng: Random, _: Callable[[], None]) -> None:
        """Hold the write lock, often for longer than anybody waits for it."""
        connection = sqlite3.connect(self._path, isolation_level=None, timeout=5)
        try:
            with suppress(sqlite3.OperationalError):  # it is busy already
                connection.execute("BEGIN IMMEDIATE")
                self.calm.wait(rng.uniform(*rng.choice(OUTAGE_SECONDS)))
                connection.execute("ROLLBACK")
        finally:
            connection.close()

    def close(self) -> None:
        """The file goes with its folder."""


class PostgresServer:
    """A server that is killed and started again, which then recovers from its write-ahead log, or that is frozen."""

    fault = "database_kill"

    def __init__(self, folder: Path) -> None:
        self.calm = threading.Event()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # platformdirs, imported by pgserver, wants XDG_RUNTIME_DIR
            from pgserver import postgres_server
        self._server: Any = postgres_server.get_server(folder / "postgres", cleanup_mode="stop")
        self.url = str(self._server.get_uri())

    def hurt(self, rng: Random, await_write: Callable[[], None]) -> None:
        """Freeze the server, or kill it, or make it drop everything at once; it is back after a moment."""
        postmaster = psutil.Process(self._server.get_pid())
        family = [postmaster, *postmaster.children(recursive=True)]
        how = rng.choice((signal.SIGKILL, signal.SIGQUIT, signal.SIGSTOP))
        if how == signal.SIGSTOP:
            self._signal(family, signal.SIGSTOP)
            self.calm.wait(rng.uniform(*rng.choice(OUTAGE_SECONDS)))
            self._signal(family, signal.SIGCONT)
            return
        await_write()
        postmaster.send_signal(how)
        psutil.wait_procs(family, timeout=20)
        time.sleep(rng.uniform(0.0, 3.0))
        self._server.ensure_postgres_running()

    @staticmethod
    def _signal(family: Sequence[psutil.Process], number: int) -> None:
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def close(self) -> None:
        """Stop the server."""
        self._server.cleanup()


ChaosDatabase = SqliteFile | PostgresServer
"""A database that a campaign may `hurt` for a moment. Its `url` stays the same afterwards. `calm` ends what lasts."""
