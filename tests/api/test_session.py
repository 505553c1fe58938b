"""One exploration for a program on this machine: what it is told if the exploration cannot be."""

from __future__ import annotations

import io
import json
import os
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from bexp.api import session
from bexp.api.cli import local_run
from bexp.api.cli.errors import CommandError, ExitCode
from bexp.api.examples import REQUEST
from bexp.api.local_worker import WorkerEndedError
from bexp.api.stored import StoredExplorations
from bexp.client.errors import ProblemError, ServiceError
from bexp.explorer.request.request import ExplorationRequest
from bexp.storage.database import Database


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (CommandError(ExitCode.USAGE, "no device", "cuda:7"), "no device; cuda:7"),
        (ServiceError("the database\nis locked"), "the database; is locked"),
        (ProblemError(429, {"detail": "the queue is full"}), "the queue is full"),
    ],
)
def test_a_failure_is_one_line_of_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failure: Exception, said: str
) -> None:
    def fail(request: ExplorationRequest, *_: Any) -> None:
        assert request.device_kind == "cpu"
        raise failure

    monkeypatch.setattr(session, "LocalRun", fail)
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps({"document": REQUEST, "device": "cpu"}) + "\n"))
    assert session.main() == ExitCode.SERVICE
    assert json.loads(capsys.readouterr().out) == {"error": said}


@pytest.mark.parametrize("ends", ["the exploration", "stdin"])
def test_what_an_exploration_has_come_to_is_told_unless_stdin_ends_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sqlite_database: Database, ends: str
) -> None:
    read_end, write_end = map(os.fdopen, os.pipe(), "rw")
    write_end.write(json.dumps({"document": REQUEST, "device": None}) + "\n")
    write_end.flush()

    run: Any = SimpleNamespace(job_id="1" * 26, worker_name="own")
    run.cancel = lambda stored: stored.cancel(run.job_id)
    run.cancelling = nullcontext
    run.check = lambda stored: write_end.close() if ends == "stdin" else run.cancel(stored)
    monkeypatch.setattr(session, "LocalRun", lambda *_: nullcontext(run))
    monkeypatch.setattr(session, "new_job_id", lambda: run.job_id)
    monkeypatch.setattr("sys.stdin", read_end)
    monkeypatch.setenv("BEXP_DATABASE_URL", sqlite_database.url)
    with read_end, write_end:
        assert session.main() == ExitCode.ANSWER
        write_end.close()
    first, *events, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["exploration"]["state"], first["exploration"]["priority"]) == ("queued", 0)
    assert StoredExplorations(sqlite_database).get(run.job_id).state == "cancelled"
    if ends == "stdin":
        assert last["event"]["code"] == 101
    else:
        assert [told["event"]["code"] for told in events] == [101, 404]
        assert (last["exploration"]["state"], last["trials"], last["result"]) == ("cancelled", [], None)


def test_an_exploration_whose_worker_fails_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sqlite_database: Database
) -> None:
    class Failing:
        has_ended = True

        def __init__(self, *_: Any, **__: Any) -> None: ...

        def check(self) -> bool:
            raise WorkerEndedError("the worker ended: no such device", 3)

        def stop(self, **_: Any) -> None: ...

    read_end, write_end = map(os.fdopen, os.pipe(), "rw")
    monkeypatch.setattr(local_run, "LocalWorker", Failing)
    monkeypatch.setattr("sys.stdin", read_end)
    monkeypatch.setenv("BEXP_DATABASE_URL", sqlite_database.url)
    write_end.write(json.dumps({"document": REQUEST, "device": "cpu"}) + "\n")
    write_end.flush()
    with read_end, write_end:
        assert session.main() == ExitCode.SERVICE
        write_end.close()
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"error": "the worker ended: no such device"}
    (job,) = StoredExplorations(sqlite_database).list()
    assert job.state == "cancelled"


def test_each_wrong_field_of_a_request_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"document": {**REQUEST, "batch_size": 0, "tolerance": -1}, "device": "cpu"}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(asked) + "\n"))
    assert session.main() == ExitCode.USAGE
    error = json.loads(capsys.readouterr().out)["error"]
    assert [part.partition(":")[0] for part in error.split("; ")] == ["batch_size", "tolerance"]
