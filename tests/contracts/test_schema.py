from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from bexp.explorer.formats.request import parse_request
from bexp.explorer.records.event import EventCode, EventDraft, Progress
from bexp.explorer.records.trial import Trial
from bexp.explorer.spec.request import ExplorationRequest
from bexp.storage import migrations
from bexp.storage.database import Database
from bexp.storage.events import read_events
from bexp.storage.jobs import JobState, get_job
from bexp.storage.listing import JobFilter, list_jobs
from bexp.storage.owners import ALL_SCOPES, LOCAL_OWNER
from bexp.storage.queue import Queue
from bexp.storage.schema import VERSION_TABLE, NewerSchemaError, include_name, is_current, latest_revision, upgrade
from bexp.storage.tables import jobs, metadata
from bexp.storage.tokens import digest_of, verify_token
from bexp.storage.trials import StoredTrial, read_trials
from tests.contracts.samples import make_progress, make_request, make_trial

UPGRADE = """
import sys
from bexp.storage.database import open_database
from bexp.storage.schema import is_current, upgrade
database = open_database(sys.argv[1])
upgrade(database)
assert is_current(database)
database.dispose()
"""


READ_BY_WORKERS = ("0015", "c51f70044a48b116")
"""The revision since which workers read requests and trials in their present form, and the digest of that form."""


def without_texts(schema: Any) -> Any:
    """Return a JSON schema without what only people read."""
    if isinstance(schema, list):
        return [without_texts(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    texts = {name for name in ("title", "description", "examples") if not isinstance(schema.get(name), dict)}
    return {name: without_texts(value) for name, value in schema.items() if name not in texts}


def migrate(database: Database, direction: Callable[[Config, str], None], revision: str) -> None:
    """Bring the tables to a version that is not the latest."""
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    with database.begin() as connection:
        config.attributes["connection"] = connection
        direction(config, revision)


def test_the_file_of_the_last_migration_is_named_after_its_revision() -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    assert latest_revision() == ScriptDirectory.from_config(config).get_current_head()


def test_what_workers_read_changes_only_with_a_migration() -> None:
    """A worker of an earlier version notices a later one by the schema's revision alone; it would otherwise end new
    jobs as failed, because it cannot read them.
    """
    revision, digest = READ_BY_WORKERS
    forms = [without_texts(model.model_json_schema()) for model in (ExplorationRequest, Trial)]
    found = hashlib.sha256(json.dumps(forms, sort_keys=True).encode()).hexdigest()[:16]
    assert found == digest, (
        "the form of stored requests or trials has changed: add a migration, which may be empty, unless the last one is"
        f" not released yet, and let READ_BY_WORKERS be ({latest_revision()!r}, {found!r})"
    )
    assert revision <= latest_revision()


def test_a_fresh_database_is_not_current(open_url: Callable[[str], Database], empty_database_url: str) -> None:
    assert not is_current(open_url(empty_database_url))


def test_upgrade_is_safe_when_several_processes_start_at_once(empty_database_url: str) -> None:
    command = [sys.executable, "-c", UPGRADE, empty_database_url]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for process in processes:
        _, errors = process.communicate(timeout=500)
        assert process.returncode == 0, errors


def test_an_upgrade_keeps_the_cursors_of_stored_trials_and_takes_more(
    open_url: Callable[[str], Database], empty_database_url: str
) -> None:
    database = open_url(empty_database_url)
    migrate(database, command.upgrade, "0001")
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    job = {
        "id": "old",
        "state": "running",
        "request": make_request().model_dump(mode="json"),
        "devices_needed": 1,
        "created_at": moment,
        "queued_at": moment,
        "attempt": 1,
        "num_releases": 0,
        "owner": "a",
        "lease_expires_at": moment,
        "cancel_requested": False,
        "last_seq": 1,
        "space": {"size": 7},
        "version": 1,
    }
    row = {"job_id": "old", "at": moment, "outcome": "ok"}
    with database.begin() as connection:
        old = sa.MetaData()
        old.reflect(connection, only=["bexp_jobs", "bexp_trials", "bexp_events"])
        connection.execute(sa.insert(old.tables["bexp_jobs"]), [job])
        for number in (1, 0, 4):  # 2 and 3 are in flight
            document = make_trial(number).model_dump(mode="json")
            connection.execute(sa.insert(old.tables["bexp_trials"]), [row | {"number": number, "trial": document}])
        event = {"job_id": "old", "seq": 1, "at": moment, "code": 101, "message": "é", "data": {"a": [1]}}
        connection.execute(sa.insert(old.tables["bexp_events"]), [event])
    assert not is_current(database)

    upgrade(database)
    assert is_current(database)
    assert read_trials(database, "old") == [StoredTrial(number, make_trial(number)) for number in (0, 1, 4)]
    (event_of_old,) = read_events(database, "old")
    assert (event_of_old.message, event_of_old.data) == ("é", {"a": [1]})
    assert get_job(database, "old").space == {"size": 7}
    queue = Queue(database)
    claim = queue.claim("b", device_kind="cpu", num_devices=1, fingerprint="f")
    assert claim is not None
    assert claim.history == (make_trial(0), make_trial(1), make_trial(4))
    for number in (3, 2):
        queue.record(claim.lease, make_progress(number))
    assert read_trials(database, "old", after=4) == [StoredTrial(5, make_trial(3)), StoredTrial(6, make_trial(2))]


def test_an_upgrade_gives_what_is_stored_to_the_local_owner_and_keeps_what_tokens_may_do(
    open_url: Callable[[str], Database], empty_database_url: str
) -> None:
    database = open_url(empty_database_url)
    migrate(database, command.upgrade, "0007")
    request, secret = make_request(), "bexp_" + "a" * 43
    moment = datetime.now(UTC)
    job = {
        **{"id": "old", "state": "queued", "request": request.model_dump(mode="json"), "devices_needed": 1},
        **{"created_at": moment, "queued_at": moment, "attempt": 0, "num_releases": 0, "cancel_requested": False},
        **{"last_seq": 0, "version": 1, "idempotency_key": "k", "body_hash": "b"},
    }
    token = {"name": "t", "prefix": secret[:11], "digest": digest_of(secret), "created_at": moment}
    with database.begin() as connection:
        old = sa.MetaData()
        old.reflect(connection, only=["bexp_jobs", "bexp_tokens"])
        connection.execute(sa.insert(old.tables["bexp_jobs"]), [job])
        connection.execute(sa.insert(old.tables["bexp_tokens"]), [token])

    upgrade(database)
    found = verify_token(database, secret)
    assert found is not None
    assert (found.owner, found.scopes, found.expires_at) == (LOCAL_OWNER, ALL_SCOPES, None)
    assert [job.id for job in list_jobs(database, JobFilter(owner=found.owner))[0]] == ["old"]
    again, is_new = Queue(database).enqueue(request, idempotency_key="k", body_hash="b")
    assert (again.id, is_new) == ("old", False)


def test_a_downgrade_keeps_the_trials_and_the_log(database: Database) -> None:
    queue = Queue(database)
    queue.enqueue(make_request())
    claim = queue.claim("a", device_kind="cpu", num_devices=1, fingerprint="f")
    assert claim is not None
    queue.record(claim.lease, make_progress(1))
    line = EventDraft(code=EventCode.RECOMMENDATION, message="a line", data={"confidence": 1})
    queue.record(claim.lease, Progress(events=(line, line)))
    log = read_events(database, claim.job.id)
    migrate(database, command.downgrade, "0001")
    with database.read() as connection:
        assert [column["name"] for column in sa.inspect(connection).get_columns("bexp_trials")] == [
            *("job_id", "number", "at", "outcome", "trial")
        ]
    upgrade(database)
    assert read_trials(database, claim.job.id) == [StoredTrial(1, make_trial(1))]
    assert read_events(database, claim.job.id) == log
    assert get_job(database, claim.job.id).request == make_request()


def test_an_upgrade_fills_in_what_a_list_shows_of_stored_explorations(database: Database) -> None:
    queue = Queue(database)
    requests = [make_request(), parse_request({"model": {"model_type": "llama", "_name_or_path": "a/Llama-1"}})]
    for request in requests:
        queue.enqueue(request)
        claim = queue.claim(
            "a", device_kind="cpu", num_devices=1, fingerprint="f", targets={"bexp": "", "transformers": ""}
        )
        assert claim is not None
        queue.record(claim.lease, make_progress(1))
    before = list_jobs(database)
    migrate(database, command.downgrade, "0004")
    upgrade(database)
    assert list_jobs(database) == before
    assert {(job.model_name, job.micro_batch_size, job.confidence) for job in before[0]} == {
        ("tiny", 2, 45),
        ("Llama-1", 2, 45),
    }


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


def test_a_schema_of_a_later_version_is_refused(database: Database) -> None:
    with database.begin() as connection:
        connection.execute(sa.text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
    with pytest.raises(NewerSchemaError, match="a later version of bexp has upgraded the database"):
        upgrade(database)


def test_an_older_schema_is_not_current(database: Database) -> None:
    with database.begin() as connection:
        connection.execute(sa.text(f"DELETE FROM {VERSION_TABLE}"))
    assert not is_current(database)


def test_a_worker_takes_no_job_from_a_later_version(database: Database) -> None:
    queue = Queue(database)
    job, _ = queue.enqueue(make_request())
    with database.begin() as connection:
        connection.execute(sa.text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
        later = make_request().model_dump(mode="json") | {"field_of_a_later_version": 1}
        connection.execute(sa.update(jobs).values(request=later))
    with pytest.raises(NewerSchemaError):
        queue.claim("a", device_kind="cpu", num_devices=1, fingerprint="f")
    assert [event.code for event in read_events(database, job.id)] == [EventCode.QUEUED]
    assert get_job(database, job.id).state is JobState.QUEUED
