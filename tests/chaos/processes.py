"""The processes of a campaign: an API and workers that answer from a recorded table."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random

import psutil

from tests.chaos import failpoints
from tests.chaos.fork_server import ForkServer, StartedProcess
from tests.chaos.slow_worker import VARIABLE
from tests.waits import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
LEASE_SECONDS = 2.0
CALM_SECONDS = 0.5
"""How much later than its end an API may be missed, and what it may still have to do when it answers again."""

LOGGED_CHARACTERS = 8000
STACK_BEGINS = ("Fatal Python error", "Thread 0x", "Current thread", "  File ")
"""Of the lines that Python writes when a signal aborts it."""

TABLES = tuple(
    ROOT / "benchmarks" / "results" / "tables" / f"{name}.jsonl"
    for name in ("llama-8k", "gpt2-124m", "llama-2k-32gib", "switch-like")
)
"""None of them answers what another one does."""
TABLE = TABLES[0]


class Service:
    """Starts processes on one database, and starts another for each that has ended.

    Its workers answer from `tables` in turn, and each of their trials takes `trial_seconds`; where it `measures`, one
    more has a profiler process that measures on this machine's processor. `cold_share` of the processes are started by
    the interpreter, the others by a fork server. Edges can be armed in `failpoints_folder`.
    """

    def __init__(
        self,
        database_url: str,
        folder: Path,
        num_workers: int,
        cold_share: float = 0.05,
        trial_seconds: float = 0.0,
        *,
        require_token: bool = False,
        failpoints_folder: Path | None = None,
        lease_seconds: float = LEASE_SECONDS,
        tables: Sequence[Path] = (TABLE,),
        measures: bool = False,
    ) -> None:
        self.database_url = database_url
        self.measures = measures
        self._folder = str(folder)
        self.tables = tables[:num_workers]
        self.disturbances: list[list[float]] = []
        """When the API was killed, frozen or starting: from and until, in seconds since 1970."""
        self.api_pids: set[int] = set()
        self._api_seen_at = time.time()
        self._serve = ("serve", *(["--require-token", "--token-rate", "0", "--address-rate", "0"] * require_token))
        self.num_kills = 0
        """How often the API was killed."""
        self.workers: list[StartedProcess] = []
        self._reserved = reserve()
        self.port: int = self._reserved.getsockname()[1]
        self.api_answers_since: float | None = None
        self._num_workers = num_workers
        self._log = (folder / "processes.log").open("w+b")
        left_out = ("BEXP_", "PYTHONDONTWRITEBYTECODE")  # or each process that the interpreter starts compiles all
        self._environment = {key: value for key, value in os.environ.items() if not key.startswith(left_out)}
        self._environment |= {
            "BEXP_DATABASE_URL": database_url,
            "BEXP_LEASE_SECONDS": str(lease_seconds),
            "BEXP_POLL_SECONDS": "0.3",
            "BEXP_RETRY_SECONDS": "0.2",
            VARIABLE: str(trial_seconds),
            "TMPDIR": str(folder),
            "BEXP_LOCK_DIRECTORY": str(folder),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "PYTHONFAULTHANDLER": "1",
        }
        if failpoints_folder is not None:
            self._environment[failpoints.VARIABLE] = str(failpoints_folder)
            self._environment = failpoints.environment_with([failpoints.CHANGE], self._environment)
        self._cold_share = cold_share
        self._rng = Random(num_workers)
        self._fork_server = ForkServer(self._environment, self._log)
        self._start_api()
        self.workers = [self._start_worker(index) for index in range(num_workers + measures)]

    @property
    def url(self) -> str:
        """Where the API answers."""
        return f"http://127.0.0.1:{self.port}"

    def note_answer(self, api: StartedProcess) -> None:
        """Take note that the API answers, if it is still this one."""
        if api is self.api and self.api_answers_since is None:
            self.api_answers_since = time.monotonic()
            self.disturbances[-1][1] = time.time()

    def was_disturbed(self, start: float, end: float) -> bool:
        """Whether the API was killed, frozen or starting at some time between these."""
        return any(since - CALM_SECONDS <= end and start <= until + CALM_SECONDS for since, until in self.disturbances)

    def tend(self) -> None:
        """Start what has ended by itself or by a fault."""
        if self.api.poll() is not None:
            self.num_kills += self.api.returncode == -signal.SIGKILL
            self._start_api()
        self._api_seen_at = time.time()
        for index, worker in enumerate(self.workers):
            if worker.poll() is not None:
                self.workers[index] = self._start_worker(index)

    def end(self) -> list[int]:
        """End all processes; return the exit statuses of the workers. Who does not end in time says where it is."""
        processes = [self.api, *self.workers]
        for process in processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.terminate()
        deadline = time.monotonic() + PATIENCE_SECONDS
        for process in processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGABRT)  # and the stack of each thread goes to the log
                process.wait()
        self._reserved.close()
        statuses = [worker.wait() for worker in self.workers]
        self._fork_server.end()
        return statuses

    def complaints(self) -> list[str]:
        """The errors that the processes logged, apart from a database that was away when one of them started."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        begins = ("Traceback", "error: Exception", *STACK_BEGINS)
        errors = [line for line in lines if " ERROR " in line or line.startswith(begins)]
        self._log.close()
        return [line for line in errors if "the database cannot be used" not in line]

    def explain_silence(self) -> str:
        """How the API ended, or where its threads are, and the last that was logged. The API is ended."""
        status = self.api.poll()
        self.api.send_signal(signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            self.api.wait(CALM_SECONDS)
        self._log.seek(0)
        last = self._log.read().decode(errors="replace")[-LOGGED_CHARACTERS:]
        return f"it {'runs' if status is None else f'has ended with status {status}'}; the log ends with: {last}"

    def orphans(self) -> int:
        """The number of processes of this service that are still there, profilers included."""
        found = 0
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                found += process.environ().get("BEXP_LOCK_DIRECTORY") == self._folder
        return found

    def _start_api(self) -> None:
        self.api = self._start("bexp.api.cli", *self._serve, "--port", str(self.port))
        self.api_pids.add(self.api.pid)
        if self.api_answers_since is not None or not self.disturbances:
            self.disturbances.append([self._api_seen_at, float("inf")])
        self.api_answers_since = None

    def _start_worker(self, index: int) -> StartedProcess:
        if index == self._num_workers:
            return self._start("bexp.workers", "--device", "cpu")
        table = self.tables[index % len(self.tables)]
        return self._start("tests.chaos.slow_worker", "--device", f"replay:{table}")

    def _start(self, module: str, *arguments: str) -> StartedProcess:
        if self._rng.random() >= self._cold_share:
            return self._fork_server.start(module, *arguments)
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )


def reserve() -> socket.socket:
    """Return a socket that keeps a port for processes that listen on it one after the other."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved
