from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import optuna
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from storage.database import Database
from storage.schema import VERSION_TABLE, include_name, is_current, upgrade
from storage.studies import study_opener
from storage.tables import metadata

UPGRADE = """
import sys
from storage.database import open_database
from storage.schema import is_current, upgrade
database = open_database(sys.argv[1])
upgrade(database)
assert is_current(database)
database.dispose()
"""


def test_a_fresh_database_is_not_current(open_url: Callable[[str], Database], empty_database_url: str) -> None:
    assert not is_current(open_url(empty_database_url))


def test_upgrade_is_safe_when_several_processes_start_at_once(empty_database_url: str) -> None:
    command = [sys.executable, "-c", UPGRADE, empty_database_url]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for process in processes:
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors


def test_upgrade_twice_changes_nothing(database: Database) -> None:
    upgrade(database)
    assert is_current(database)


def test_migrations_lead_to_the_tables(database: Database) -> None:
    options = {"version_table": VERSION_TABLE, "include_name": include_name, "compare_type": True}
    with database.read() as connection:
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, metadata) == []


def test_autogenerate_would_see_a_missing_column(database: Database) -> None:
    with database.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE bexp_workers DROP COLUMN pid")
    with database.read() as connection:
        context = MigrationContext.configure(connection, opts={"include_name": include_name})
        assert [change[0] for change in compare_metadata(context, metadata)] == ["add_column"]


def test_an_older_schema_is_not_current(database: Database) -> None:
    with database.begin() as connection:
        connection.execute(sa.text(f"DELETE FROM {VERSION_TABLE}"))
    assert not is_current(database)


def test_a_study_opens_beside_the_tables_and_by_optuna_alone(database: Database) -> None:
    opener = study_opener(database, "job1")
    study = opener("", optuna.samplers.RandomSampler(seed=0))
    study.add_trial(
        optuna.trial.create_trial(
            params={"index": 3}, distributions={"index": optuna.distributions.IntDistribution(0, 7)}, value=2.5
        )
    )
    opener("groups=1", optuna.samplers.RandomSampler(seed=0))
    again = opener("", optuna.samplers.RandomSampler(seed=0))
    assert again.best_value == 2.5
    opener.close()

    storage = optuna.storages.RDBStorage(database.url)
    assert sorted(optuna.get_all_study_names(storage)) == ["job1", "job1/groups=1"]
    loaded = optuna.load_study(study_name="job1", storage=storage)
    assert loaded.direction is optuna.study.StudyDirection.MAXIMIZE
    assert [trial.params for trial in loaded.trials] == [{"index": 3}]
    storage.remove_session()
    storage.engine.dispose()


def test_a_study_does_not_open_without_the_schema(open_url: Callable[[str], Database], empty_database_url: str) -> None:
    """Nothing is created at run time, so that several workers never create tables at once."""
    database = open_url(empty_database_url)
    with pytest.raises(RuntimeError, match="not up to date"):
        study_opener(database, "job1")
    with database.read() as connection:
        assert sa.inspect(connection).get_table_names() == []
