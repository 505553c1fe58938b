"""Measured components that later explorations reuse, on both databases."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from bexp.explorer.records.device_report import EarlierRuns
from bexp.explorer.records.measurement import Conditions
from bexp.explorer.records.trial import Trial
from bexp.explorer.request.request import ExplorationRequest
from bexp.storage import components as storage_components
from bexp.storage.components import find_earlier_runs, keep_components, prune_components
from bexp.storage.database import Database
from bexp.storage.queue import Queue
from bexp.storage.tables import components
from tests.contracts.samples import MODEL, make_report, make_request, make_trial, make_worker

SOFTWARE = {"bexp": "1.0"}


def keep(database: Database, job_id: str, *trials: Trial, software: dict[str, str] = SOFTWARE, **changes: Any) -> int:
    return keep_components(database, job_id, make_request(**changes), make_report(), software, trials)


def find(database: Database, request: ExplorationRequest | None = None, **software: str) -> EarlierRuns:
    return find_earlier_runs(database, request or make_request(), make_report(), SOFTWARE | software)


def make_older(database: Database, age: timedelta) -> None:
    """Let what is newer be as old as this."""
    with database.begin() as connection:
        at = database.now(connection) - age
        connection.execute(sa.update(components).where(components.c.at > at).values(at=at))


def test_components_of_the_same_model_on_the_same_hardware_are_found(database: Database) -> None:
    assert keep(database, "one", make_trial(0), make_trial(1)) == 2
    make_older(database, timedelta(hours=1))
    found = find(
        database, make_request(batch_size=64, tolerance=0.05, model=MODEL.model_copy(update={"name": "other"}))
    )
    assert found.num_explorations == 1
    assert {run.measurement for run in found.runs} == {
        trial.measurement.components[0] for trial in (make_trial(0), make_trial(1))
    }
    assert all(3600 <= run.age_seconds < 3700 for run in found.runs)
    assert find(database, make_request(mode="eval")) == EarlierRuns()


def test_of_each_component_the_newest_runs_are_reused(database: Database) -> None:
    for number in range(5):
        keep(database, f"job {number}", make_trial(0))
        make_older(database, timedelta(minutes=5 - number))
    found = find(database)
    assert [run.age_seconds // 60 for run in found.runs] == [2, 1]
    assert found.num_explorations == 2


def test_a_job_that_is_kept_twice_counts_once(database: Database) -> None:
    keep(database, "one", make_trial(0))
    keep(database, "one", make_trial(0), make_trial(1))
    assert len(find(database).runs) == 2


def test_contaminated_runs_are_not_kept(database: Database) -> None:
    trial = make_trial(0)
    shared = trial.measurement.components[0].model_copy(update={"conditions": Conditions(foreign_processes=1)})
    measurement = trial.measurement.model_copy(update={"components": (shared,)})
    assert keep(database, "one", trial.model_copy(update={"measurement": measurement})) == 0


def test_other_versions_are_counted_and_not_reused(database: Database) -> None:
    keep(database, "one", make_trial(0))
    found = find(database, bexp="2.0")
    assert (found.runs, found.num_ignored, found.other_versions) == ((), 1, ("torch 2.13, bexp 1.0",))
    for number in range(2, 6):
        make_older(database, timedelta(minutes=9 - number))
        keep(database, f"job {number}", make_trial(0), make_trial(1), software={"bexp": f"{number}.0"})
    found = find(database)
    assert (len(found.runs), found.num_ignored) == (1, 8)
    assert found.other_versions == tuple(f"torch 2.13, bexp {number}.0" for number in (5, 4, 3)), "the newest three"
    other = find_earlier_runs(database, make_request(), make_report("Another device"), SOFTWARE)
    assert other == EarlierRuns()  # nobody expects those


@pytest.mark.parametrize("changes", [{"fresh": True}, {"sampler": "tpe"}, {"sampler": "random"}])
def test_nothing_is_reused_where_that_is_not_wanted(database: Database, changes: dict[str, Any]) -> None:
    keep(database, "one", make_trial(0), **changes)
    assert find(database, make_request(**changes)) == EarlierRuns()
    assert len(find(database).runs) == 1


def test_long_names_of_devices_and_versions_are_cut_alike_where_they_are_kept_and_found(database: Database) -> None:
    report, software = make_report("d" * 300), {"bexp": "9" * 300}
    keep_components(database, "one", make_request(), report, software, [make_trial(0)])
    found = find_earlier_runs(database, make_request(), report, SOFTWARE)
    assert (found.num_ignored, len(found.other_versions[0])) == (1, 255)
    assert len(find_earlier_runs(database, make_request(), report, software).runs) == 1
    versions = report.hardware.versions.model_copy(update={"driver": "550"})
    with_driver = report.model_copy(update={"hardware": report.hardware.model_copy(update={"versions": versions})})
    keep_components(database, "two", make_request(), with_driver, {}, [make_trial(0)])
    assert find_earlier_runs(database, make_request(), report, SOFTWARE).other_versions[0] == "torch 2.13, driver 550"


def test_what_cannot_be_read_and_what_another_keeps_at_this_moment_is_left_out(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(database, "one", make_trial(0), make_trial(1))
    keep(database, "two", make_trial(0))
    with database.begin() as connection:
        latest = sa.select(sa.func.max(components.c.at)).scalar_subquery()
        ahead = database.now(connection) + timedelta(hours=1)
        connection.execute(sa.update(components).where(components.c.at == latest).values(measurement={"of": "another"}))
        connection.execute(sa.update(components).where(components.c.at != latest).values(at=ahead))
    found = find(database)
    assert (len(found.runs), found.num_explorations) == (2, 1)
    assert {run.age_seconds for run in found.runs} == {0.0}, "the clock was set back"
    monkeypatch.setattr(storage_components, "MAX_REUSED", 1)
    assert len(find(database).runs) == 1

    def fail(*_: object) -> None:
        raise sa.exc.IntegrityError("INSERT", {}, Exception("the key exists"))

    monkeypatch.setattr(storage_components, "_drop_old", fail)
    assert keep(database, "one", make_trial(2)) == 0
    monkeypatch.undo()
    assert find(database) == found


def test_rows_are_bounded_by_number_and_by_age(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_components, "MAX_ROWS", 2)
    for number in range(4):
        keep(database, f"job {number}", make_trial(0))
        make_older(database, timedelta(minutes=4 - number))
    keep(database, "newest", make_trial(0))
    assert [run.age_seconds // 60 for run in find(database).runs] == [1, 0], "the newest are left"
    monkeypatch.setattr(storage_components, "MAX_ROWS", 1)
    keep(database, "one more", make_trial(0))
    assert [run.age_seconds < 60 for run in find(database).runs] == [True], "all that is too much goes at once"
    with database.read() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(components)) == 1
    monkeypatch.undo()
    with database.begin() as connection:
        at = database.now(connection) - storage_components.MAX_AGE - timedelta(days=1)
        connection.execute(sa.update(components).values(at=at))
    keep(database, "last", make_trial(0))
    assert find(database).num_explorations == 1
    keep(database, "beside it", make_trial(1))
    assert find(database).num_explorations == 2


def test_components_are_pruned_by_age(database: Database) -> None:
    keep(database, "one", make_trial(0))
    make_older(database, timedelta(days=2))
    keep(database, "two", make_trial(0), make_trial(1))
    assert prune_components(database, older_than=timedelta(days=1)) == 1
    assert prune_components(database) == 2


def test_a_job_reuses_what_was_known_when_it_was_first_claimed(database: Database) -> None:
    queue, report = Queue(database), make_report()
    queue.enqueue(make_request())
    keep(database, "earlier", make_trial(0))
    claim = queue.claim(make_worker(fingerprint=report.hardware.fingerprint))
    assert claim is not None
    pinned = queue.pin(claim.lease, report, software=SOFTWARE)
    assert len(pinned.earlier.runs) == 1
    keep(database, "meanwhile", make_trial(0))
    assert queue.pin(claim.lease, report, software=SOFTWARE) == pinned
