"""A real API on a real database, driven by a scripted worker, for commands that run in this process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from bexp.api.cli import app
from bexp.api.settings import ServiceSettings
from bexp.explorer.records.event import EventCode, EventDraft, Progress
from bexp.explorer.records.recommendation import Answer
from bexp.storage.database import Database
from bexp.storage.jobs import JobState
from bexp.storage.queue import Queue
from tests.api.cli.samples import ANSWER, EVENTS, RECOMMENDATION, TINY
from tests.api.serving import start
from tests.contracts.samples import make_worker
from tests.waits import PATIENCE_SECONDS

Run = Callable[..., "Finished"]
Started = list[tuple[list[str], dict[str, str]]]
"""Command lines with their environments."""


@dataclass(frozen=True)
class Finished:
    """What a command left behind."""

    code: int
    stdout: str
    stderr: str


@pytest.fixture
def configure(tmp_path: Path) -> Callable[..., Path]:
    """Writes a configuration: that of a small model, with other fields, or a document."""

    def write(document: dict[str, Any] | None = None, **changes: Any) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({**(TINY if document is None else document), **changes}))
        return path

    return write


@pytest.fixture
def config(configure: Callable[..., Path]) -> Path:
    """The configuration of a small model."""
    return configure()


@pytest.fixture
def stored_at(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a database that no other test has."""
    path = tmp_path_factory.mktemp("service") / "bexp.db"
    path.write_bytes(sqlite_template.read_bytes())
    return f"sqlite:///{path}"


@pytest.fixture(scope="session")
def ending() -> Iterator[list[threading.Thread]]:
    """Services that end while other tests run: to wait for each would take 0.2 s. All have ended with the session."""
    ending: list[threading.Thread] = []
    yield ending
    for thread in ending:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


@pytest.fixture
def service(stored_at: str, ending: list[threading.Thread]) -> Iterator[str]:
    """The URL of an API on this database."""
    served = start(ServiceSettings(stored_at, poll_seconds=0.05))
    ending.append(served.thread)
    yield served.url
    served.server.should_exit = True


@pytest.fixture
def queue(stored_at: str, open_url: Callable[[str], Database]) -> Queue:
    """The queue of the service."""
    return Queue(open_url(stored_at))


@pytest.fixture
def requiring(queue: Queue) -> Iterator[str]:
    """The address of a service that requires tokens."""
    served = start(ServiceSettings(queue.database.url, require_token=True, poll_seconds=0.05))
    yield served.url
    served.stop()


@pytest.fixture
def guarded(requiring: str, queue: Queue) -> Iterator[tuple[str, Database]]:
    """The address of a server for a service that requires tokens, and the database of that."""
    from tests.api.cli.conversations import serve  # needs the extra

    for url in serve(requiring):
        yield url, queue.database


@pytest.fixture(params=["service", "database"])
def bexp(request: pytest.FixtureRequest, stored_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in this process, in an empty folder: against the service, and in its database."""
    if request.param == "service":
        monkeypatch.setenv("BEXP_API_URL", request.getfixturevalue("service"))
    else:
        monkeypatch.delenv("BEXP_API_URL", raising=False)
    monkeypatch.setenv("BEXP_DATABASE_URL", stored_at)
    monkeypatch.delenv("BEXP_API_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path) -> Finished:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return Finished(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """The commands that this process would have become."""
    started: Started = []

    def become(program: str, arguments: list[str], environment: dict[str, str]) -> None:
        assert program == arguments[0]
        started.append((arguments, environment))

    monkeypatch.setattr(os, "execvpe", become)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return started


class ScriptedWorker:
    """Runs the next job as a real worker would, with made-up results."""

    def __init__(self, queue: Queue, answer: Answer | None, state: JobState, last: EventDraft) -> None:
        self._queue = queue
        self._answer = answer
        self._state = state
        self._last = last
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def _run(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            claim = self._queue.claim(make_worker("scripted"))
            if claim is None:
                time.sleep(0.05)
                continue
            trial, recommendation = (
                EventDraft(code=event.code, message=event.message, data=event.data) for event in EVENTS[2:4]
            )
            if self._answer is not None and self._answer.recommendation is not None:
                step = Progress(events=(trial, recommendation), recommendation=RECOMMENDATION)
                self._queue.record(claim.lease, step)
            self._queue.finish(claim.lease, self._state, answer=self._answer, error=None, events=(self._last,))
            return


@pytest.fixture
def worker(queue: Queue) -> Callable[..., ScriptedWorker]:
    """Makes workers that end a job as told, by default with an answer."""

    def make(
        answer: Answer | None = ANSWER,
        state: JobState = JobState.SUCCEEDED,
        code: EventCode = EventCode.SUCCEEDED,
        message: str = "done",
    ) -> ScriptedWorker:
        return ScriptedWorker(queue, answer, state, EventDraft(code=code, message=message))

    return make
