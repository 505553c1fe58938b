"""The Optuna studies of a job, written into Optuna's own tables on demand."""

from __future__ import annotations

from typing import Any

import optuna
import pytest
import sqlalchemy as sa

from bexp.storage import studies
from bexp.storage.database import Database
from bexp.storage.jobs import JobState
from bexp.storage.leases import Lease
from bexp.storage.pruning import delete_job
from bexp.storage.queue import Queue
from bexp.storage.schema import exclusive
from bexp.storage.studies import StudyLocation, drop_studies, write_studies
from tests.contracts.jobs import store
from tests.contracts.samples import make_progress, make_report, make_request, make_worker


def make_job(database: Database, *numbers: int) -> tuple[Queue, Lease]:
    """A running job with these trials, whose micro-batch is one more than their number."""
    queue = Queue(database)
    queue.enqueue(make_request())
    claim = queue.claim(make_worker())
    assert claim is not None
    queue.pin(claim.lease, make_report())
    for number in numbers:
        queue.record(claim.lease, make_progress(number))
    return queue, claim.lease


def read_sizes(database: Database, name: str) -> list[int]:
    """What Optuna finds by itself."""
    storage = optuna.storages.RDBStorage(database.url)
    try:
        study = optuna.load_study(study_name=name, storage=storage)
        assert study.direction is optuna.study.StudyDirection.MAXIMIZE
        return [trial.params["micro_batch_size"] for trial in study.trials]
    finally:
        storage.remove_session()
        storage.engine.dispose()


def tables(database: Database) -> set[str]:
    with database.read() as connection:
        return set(sa.inspect(connection).get_table_names())


def test_a_study_is_written_when_it_is_asked_for_and_grows_with_the_job(database: Database) -> None:
    queue, lease = make_job(database, 3, 1)
    assert "studies" not in tables(database), "a worker writes nothing for Optuna"
    found = write_studies(database, lease.job_id)
    assert found.names == (lease.job_id,)
    password = database.engine.url.password
    assert not password or str(password) not in found.url
    assert read_sizes(database, lease.job_id) == [2, 4]
    queue.record(lease, make_progress(7))
    assert write_studies(database, lease.job_id) == found
    assert read_sizes(database, lease.job_id) == [2, 4, 8]
    assert "bexp_jobs" in tables(database)


def test_the_variants_of_a_job_are_studies_of_their_own(database: Database) -> None:
    queue, lease = make_job(database, 0)
    other = make_progress(1)
    assert other.trial is not None
    candidate = other.trial.candidate.model_copy(update={"num_query_groups": 1})
    measurement = other.trial.measurement.model_copy(update={"candidate": candidate})
    trial = other.trial.model_copy(update={"measurement": measurement})
    queue.record(lease, type(other)(other.events, trial=trial))
    assert write_studies(database, lease.job_id).names == (lease.job_id, f"{lease.job_id}/num_query_groups=1")
    assert read_sizes(database, f"{lease.job_id}/num_query_groups=1") == [2]


@pytest.mark.parametrize("unreadable", [{"request": {"of": "another version"}}, {"report": None}])
def test_without_its_request_or_report_the_first_trial_says_which_variant_is_the_main_one(
    sqlite_database: Database, unreadable: dict[str, Any]
) -> None:
    _, lease = make_job(sqlite_database, 0, 1)
    store(sqlite_database, lease.job_id, **unreadable)
    assert write_studies(sqlite_database, lease.job_id).names == (lease.job_id,)


def test_a_job_without_trials_has_no_study(database: Database) -> None:
    _, lease = make_job(database)
    assert write_studies(database, lease.job_id).names == ()
    assert write_studies(database, "another").names == ()


def test_studies_are_dropped_and_written_again(database: Database) -> None:
    queue, lease = make_job(database, 0)
    assert drop_studies(database, [lease.job_id]) == 0
    first: StudyLocation = write_studies(database, lease.job_id)
    queue.finish(lease, JobState.CANCELLED)
    assert drop_studies(database, ["another"]) == 0
    assert drop_studies(database, [lease.job_id]) == 1
    assert write_studies(database, lease.job_id) == first
    assert read_sizes(database, lease.job_id) == [1]


def test_a_deletion_waits_for_who_writes_studies_a_moment_alone(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, lease = make_job(database, 0)
    write_studies(database, lease.job_id)
    queue.finish(lease, JobState.CANCELLED)
    monkeypatch.setattr(studies, "DROP_SECONDS", 0.2)
    with exclusive(database), pytest.raises((sa.exc.OperationalError, sa.exc.TimeoutError)):
        delete_job(database, lease.job_id)
    delete_job(database, lease.job_id)
    assert drop_studies(database, [lease.job_id]) == 0


def test_studies_that_another_process_drops_meanwhile_are_no_error(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, lease = make_job(database, 0)
    write_studies(database, lease.job_id)
    delete = optuna.delete_study

    def delete_twice(**options: Any) -> None:
        delete(**options)
        delete(**options)

    monkeypatch.setattr(optuna, "delete_study", delete_twice)
    drop_studies(database, [lease.job_id])
    assert drop_studies(database, [lease.job_id]) == 0
