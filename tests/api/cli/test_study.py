"""`bexp study`: writes the Optuna study of an exploration and says where it is."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from bexp.api.cli import app
from bexp.api.cli.errors import ExitCode
from bexp.explorer.records.event import Progress
from bexp.storage.database import Database
from bexp.storage.queue import Queue
from tests.api.cli.samples import REQUEST
from tests.contracts.samples import make_candidate, make_progress, make_report, make_request, make_trial, make_worker

PASSWORD = "a-secret"


@pytest.fixture
def study(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Runs `bexp study` on the database: its exit status, and what it writes."""
    url = sa.make_url(database_url)
    if url.get_backend_name() == "postgresql":  # the server of the tests accepts any password
        url = url.set(password=PASSWORD)
    monkeypatch.setenv("BEXP_DATABASE_URL", url.render_as_string(hide_password=False))

    def run(*arguments: str) -> tuple[int, str, str]:
        done = CliRunner().invoke(app, ["study", *arguments])
        return done.exit_code, done.stdout, done.stderr

    return run


@pytest.fixture
def job_id(database: Database) -> str:
    """A job that a worker has claimed, with a trial of each of two variants."""
    queue = Queue(database)
    queue.enqueue(make_request(num_query_groups=[4, 1]))
    claim = queue.claim(make_worker())
    assert claim is not None
    queue.pin(claim.lease, make_report())
    queue.record(claim.lease, make_progress(0))
    candidate = make_candidate().model_copy(update={"num_query_groups": 1})
    measurement = make_trial(1).measurement.model_copy(update={"candidate": candidate})
    trial = make_trial(1).model_copy(update={"measurement": measurement})
    queue.record(claim.lease, Progress(make_progress(1).events, trial=trial))
    return claim.lease.job_id


def test_the_storage_and_every_study_of_the_exploration_are_printed(
    study: Callable[..., tuple[int, str, str]], job_id: str
) -> None:
    code, stdout, stderr = study(job_id)
    assert code == 0
    assert PASSWORD not in stdout + stderr
    storage, *studies = stdout.splitlines()
    assert storage.split()[0] == "storage"
    assert studies == [f"study    {job_id}", f"study    {job_id}/num_query_groups=1"]
    url = storage.split()[1]
    assert url.startswith(("sqlite:///", "postgresql"))
    assert f"optuna-dashboard --host 127.0.0.1 '{url}'" in stderr


def test_as_json_there_is_the_storage_and_the_names(study: Callable[..., tuple[int, str, str]], job_id: str) -> None:
    code, stdout, _ = study(job_id, "--json")
    assert code == 0
    assert PASSWORD not in stdout
    found = json.loads(stdout)
    assert set(found) == {"storage", "studies"}
    assert found["studies"] == [job_id, f"{job_id}/num_query_groups=1"]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("nothing", "no exploration begins with 'nothing'; `bexp list` shows them"),
        ("", "There is no exploration with this id"),
    ],
)
def test_an_unknown_exploration_has_no_study(
    study: Callable[..., tuple[int, str, str]], given: str, reason: str
) -> None:
    code, stdout, stderr = study(given)
    assert (code, stdout) == (ExitCode.USAGE, "")
    assert reason in " ".join(stderr.split())


def test_an_exploration_that_no_worker_has_begun_has_no_study(
    study: Callable[..., tuple[int, str, str]], database: Database
) -> None:
    queued, _ = Queue(database).enqueue(REQUEST)
    code, stdout, stderr = study(queued.id)
    assert (code, stdout) == (ExitCode.USAGE, "")
    assert "there is no study" in stderr
