"""The copy of a job's Optuna study in Optuna's own tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import optuna
import pytest
import sqlalchemy as sa
from optuna.distributions import CategoricalDistribution

from explorer.search.optuna_trials import TRIAL_NUMBER
from storage.database import Database
from storage.leases import Lease
from storage.queue import Queue
from storage.studies import StudyCopy, locate_studies
from storage.tables import jobs
from tests.contracts.samples import make_request


@pytest.fixture
def lease(database: Database) -> Lease:
    queue = Queue(database)
    queue.enqueue(make_request())
    claim = queue.claim("a", device_kind="cpu", num_devices=1, fingerprint="f")
    assert claim is not None
    return claim.lease


def add(study: optuna.Study, number: int, size: int, choices: Sequence[int] = (1, 2, 4)) -> None:
    study.add_trial(
        optuna.trial.create_trial(
            params={"size": size},
            distributions={"size": CategoricalDistribution(choices)},
            value=float(size),
            user_attrs={TRIAL_NUMBER: number},
        )
    )


def make_study(*sizes: int, choices: Sequence[int] = (1, 2, 4)) -> optuna.Study:
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
    for number, size in enumerate(sizes):
        add(study, number, size, choices)
    return study


def read_sizes(database: Database, name: str) -> list[int]:
    """What Optuna finds by itself."""
    storage = optuna.storages.RDBStorage(database.url)
    try:
        study = optuna.load_study(study_name=name, storage=storage)
        assert study.direction is optuna.study.StudyDirection.MAXIMIZE
        return [trial.params["size"] for trial in study.trials]
    finally:
        storage.remove_session()
        storage.engine.dispose()


def expire_and_claim_again(database: Database) -> Lease:
    with database.begin() as connection:
        connection.execute(sa.update(jobs).values(lease_expires_at=database.clock(timedelta(seconds=-1))))
    claim = Queue(database).claim("b", device_kind="cpu", num_devices=1, fingerprint="f")
    assert claim is not None
    return claim.lease


def test_optuna_opens_the_copy_beside_our_tables(database: Database, lease: Lease) -> None:
    copy = StudyCopy(database, lease)
    study = make_study(4)
    study.ask({"size": CategoricalDistribution((1, 2, 4))})  # in flight: copied once it is finished
    copy("", study)
    add(study, 3, 2)
    copy("", study)
    copy("num_query_groups=1", make_study(1))
    copy.close()
    assert read_sizes(database, lease.job_id) == [4, 2]
    assert read_sizes(database, f"{lease.job_id}/num_query_groups=1") == [1]
    found = locate_studies(database, lease.job_id)
    assert found.names == (lease.job_id, f"{lease.job_id}/num_query_groups=1")
    password = database.engine.url.password
    assert not password or str(password) not in found.url
    assert locate_studies(database, "another").names == ()


def test_a_resumed_job_continues_its_copy_without_repeating_trials(database: Database, lease: Lease) -> None:
    first = StudyCopy(database, lease)
    first("", make_study(4, 2))
    first.close()
    second = StudyCopy(database, expire_and_claim_again(database))
    second("", make_study(4, 2, 1))
    second.close()
    assert read_sizes(database, lease.job_id) == [4, 2, 1]


def test_a_worker_without_its_lease_writes_nothing(
    database: Database, lease: Lease, caplog: pytest.LogCaptureFixture
) -> None:
    stale = StudyCopy(database, lease)
    study = make_study(4)
    stale("", study)
    expire_and_claim_again(database)
    add(study, 1, 2)
    stale("", study)
    stale.close()
    assert read_sizes(database, lease.job_id) == [4]
    assert "no longer owns" in caplog.text


def test_a_copy_that_was_begun_with_other_choices_is_written_anew(database: Database, lease: Lease) -> None:
    older = StudyCopy(database, lease)
    older("", make_study(1, 2, choices=(1, 2)))
    older.close()
    newer = StudyCopy(database, lease)
    newer("", make_study(1, 2, 4))
    newer.close()
    assert read_sizes(database, lease.job_id) == [1, 2, 4]


def test_a_failure_is_logged_once_and_ends_the_copying(
    open_url: Callable[[str], Database], empty_database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is created at run time, so that several workers never create tables at once."""
    database = open_url(empty_database_url)
    copy = StudyCopy(database, Lease("job", "a", 1))
    copy("", make_study(1))
    copy("", make_study(1))
    copy.close()
    assert caplog.text.count("is not copied any further") == 1
    assert "not up to date" in caplog.text
    with database.read() as connection:
        assert sa.inspect(connection).get_table_names() == []
