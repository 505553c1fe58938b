from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from bexp.explorer.records.trial import Trial
from bexp.explorer.request.request import ExplorationRequest
from bexp.storage import schema
from bexp.storage.database import Database
from bexp.storage.events import read_events
from bexp.storage.jobs import get_job, list_jobs
from bexp.storage.queue import Queue
from bexp.storage.schema import VERSION_TABLE, include_name, is_current, latest_revision, upgrade
from bexp.storage.tables import metadata
from bexp.storage.trials import StoredTrial, read_trials
from tests.contracts.processes import bring_up_to_date, run_two
from tests.contracts.samples import make_progress, make_request, make_trial, make_worker

LATER = """
import sqlalchemy as sa
from alembic import op

revision = "9999"
down_revision = "{before}"


def upgrade():
    with op.batch_alter_table("bexp_jobs") as batch:
        batch.add_column(sa.Column("note", sa.String(8), nullable=False, server_default="none"))
"""

READ_BY_WORKERS = ("0001", "16681d6bb4406849")
"""The revision since which workers read requests and trials in their present form, and the digest of that form."""


def without_texts(form: Any) -> Any:
    """Return a JSON schema without what only people read."""
    if isinstance(form, list):
        return [without_texts(item) for item in form]
    if not isinstance(form, dict):
        return form
    texts = {name for name in ("title", "description", "examples") if not isinstance(form.get(name), dict)}
    return {name: without_texts(value) for name, value in form.items() if name not in texts}


@pytest.fixture
def later_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A version of this program with one migration more."""
    folder = tmp_path / "migrations"
    shutil.copytree(schema._MIGRATIONS, folder)
    (folder / "versions" / "v9999_later.py").write_text(LATER.format(before=latest_revision()))
    monkeypatch.setattr(schema, "_MIGRATIONS", folder)
    schema._revisions.cache_clear()
    yield
    schema._revisions.cache_clear()


def test_the_file_of_the_last_migration_is_named_after_its_revision() -> None:
    config = Config()
    config.set_main_option("script_location", str(schema._MIGRATIONS))
    assert latest_revision() == ScriptDirectory.from_config(config).get_current_head()


def test_what_workers_read_changes_only_with_a_migration() -> None:
    """A worker of an earlier version notices a later one by the schema's revision alone; it would otherwise end new
    jobs as failed, because it cannot read them.
    """
    revision, digest = READ_BY_WORKERS
    forms = [without_texts(model.model_json_schema()) for model in (ExplorationRequest, Trial)]
    found = hashlib.sha256(json.dumps(forms, sort_keys=True).encode()).hexdigest()[:16]
    assert found == digest, (
        "the form of stored requests or trials has changed: add a migration of the next generation, which may be empty,"
        f" unless the last one is not released yet, and let READ_BY_WORKERS be its revision and {found!r}"
    )
    assert revision <= latest_revision()


@pytest.mark.slow(together="databases")
def test_upgrade_is_safe_when_several_processes_start_at_once(empty_database_url: str) -> None:
    run_two(bring_up_to_date, empty_database_url)


def test_an_upgrade_keeps_what_is_stored_and_the_version_before_refuses_it(
    database: Database, queue: Queue, request: pytest.FixtureRequest
) -> None:
    job, _ = queue.enqueue(make_request())
    claim = queue.claim(make_worker())
    assert claim is not None
    queue.record(claim.lease, make_progress(1))
    log = read_events(database, job.id)
    before = latest_revision()
    request.getfixturevalue("later_version")
    assert not is_current(database)
    upgrade(database)
    assert is_current(database)
    with database.read() as connection:
        assert connection.scalar(sa.text("SELECT note FROM bexp_jobs")) == "none"
    assert read_events(database, job.id) == log
    assert read_trials(database, job.id) == [StoredTrial(0, make_trial(1))]
    assert get_job(database, job.id).request == make_request()
    queue.record(claim.lease, make_progress(2))
    assert before != latest_revision()


@pytest.mark.usefixtures("later_version")
def test_a_fresh_database_gets_every_migration(open_url: Callable[[str], Database], empty_database_url: str) -> None:
    database = open_url(empty_database_url)
    assert not is_current(database)
    upgrade(database)
    assert is_current(database)
    assert list_jobs(database) == ([], None)


def test_migrations_lead_to_the_tables(database: Database) -> None:
    options = {"version_table": VERSION_TABLE, "include_name": include_name, "compare_type": True}
    with database.read() as connection:
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, metadata) == []


def _by_name(constraints: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return sorted((dict(each) for each in constraints), key=lambda each: str(each["name"]))


def test_what_a_job_is_followed_by_is_stored_once(sqlite_database: Database) -> None:
    """SQLite stores a table with a rowid, and each of its primary keys once more; Alembic does not compare that."""
    fresh = sa.create_engine("sqlite://")
    metadata.create_all(fresh)
    tables = sa.text("SELECT name, sql LIKE '%WITHOUT ROWID%' AS lean FROM sqlite_master WHERE type = 'table'")
    with fresh.connect() as connection, sqlite_database.read() as migrated:
        of_tables = {row.name: row.lean for row in connection.execute(tables)}
        of_migrations = {row.name: row.lean for row in migrated.execute(tables)}
        found, migrations = sa.inspect(connection), sa.inspect(migrated)
        for name in metadata.tables:  # Alembic does not compare these either
            assert found.get_pk_constraint(name) == migrations.get_pk_constraint(name)
            assert _by_name(found.get_foreign_keys(name)) == _by_name(migrations.get_foreign_keys(name))
            assert _by_name(found.get_unique_constraints(name)) == _by_name(migrations.get_unique_constraints(name))
    assert of_migrations == {**of_tables, VERSION_TABLE: 0}
    assert {name for name, lean in of_tables.items() if lean} == {"bexp_events", "bexp_recommendations", "bexp_trials"}
    fresh.dispose()
