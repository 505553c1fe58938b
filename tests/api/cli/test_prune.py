"""`bexp prune`: deletes finished explorations."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from bexp.api.cli import app
from bexp.api.cli.errors import ExitCode
from bexp.storage.database import Database
from bexp.storage.jobs import JobState, list_jobs
from bexp.storage.queue import Queue
from tests.contracts.samples import make_request


def test_explorations_are_pruned_by_count(sqlite_database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEXP_DATABASE_URL", sqlite_database.url)
    queue = Queue(sqlite_database)
    for _ in range(3):
        job, _ = queue.enqueue(make_request())
        queue.request_cancel(job.id)
    waiting, _ = queue.enqueue(make_request())
    run = CliRunner().invoke
    assert run(app, ["prune"]).exit_code == ExitCode.USAGE
    tried = run(app, ["prune", "--keep", "1", "--dry-run"])
    assert "2 explorations would be deleted" in tried.stderr
    assert "1 exploration would be deleted" in run(app, ["prune", "--keep", "2", "--dry-run"]).stderr
    assert run(app, ["prune", "--keep", "1", "--older-than-days", "30", "--studies"]).exit_code == 0
    left = list_jobs(sqlite_database)[0]
    assert sorted(job.state for job in left) == [JobState.CANCELLED, JobState.QUEUED]
    assert left[0].id == waiting.id


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--keep 0", ["deleted 2 explorations"]),
        ("--keep 1", ["deleted 1 exploration"]),
        ("--older-than-days 30", ["deleted 0 explorations", "measured components deleted: 0"]),
        ("--older-than-days 0", ["deleted 2 explorations", "measured components deleted: 0"]),
        ("--components", ["measured components deleted: 0"]),
        ("--studies", ["Optuna studies dropped: 0"]),
        ("--audit-older-than-days 0", ["records of the audit deleted: 4"]),
        ("--audit-older-than-days 1", []),
    ],
)
def test_only_what_is_named_is_deleted_and_told(
    sqlite_database: Database, monkeypatch: pytest.MonkeyPatch, options: str, said: list[str]
) -> None:
    monkeypatch.setenv("BEXP_DATABASE_URL", sqlite_database.url)
    queue = Queue(sqlite_database)
    for _ in range(2):
        queue.request_cancel(queue.enqueue(make_request())[0].id)
    done = CliRunner().invoke(app, ["prune", *options.split()])
    assert (done.exit_code, done.stdout, done.stderr.splitlines()) == (0, "", said)
