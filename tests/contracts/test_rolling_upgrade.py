"""Processes of two versions side by side: the later one upgrades the schema while the earlier one works."""

from __future__ import annotations

import importlib.util
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient

from bexp.api.examples import REQUEST
from bexp.api.settings import ServiceSettings
from bexp.storage import schema
from bexp.storage.database import Database
from bexp.storage.jobs import JobState
from bexp.storage.queue import Queue
from bexp.storage.schema import NewerSchemaError, is_current, latest_revision, upgrade
from bexp.storage.tables import PREFIX
from tests.api.serving import in_process
from tests.contracts.jobs import ANSWER, codes
from tests.contracts.samples import make_progress, make_report, make_request, make_worker
from tests.waits import PATIENCE_SECONDS, wait_until

ADDITIVE = """
import sqlalchemy as sa
from alembic import op

revision = "{revision}"
down_revision = "{before}"


def upgrade():
    op.add_column("bexp_jobs", sa.Column("note", sa.String(8), nullable=False, server_default="none"))
    op.create_index("ix_note", "bexp_jobs", ["note"])
    for name in ("events", "trials", "recommendations", "workers", "leaders"):
        op.add_column("bexp_" + name, sa.Column("note", sa.JSON))
    op.create_table("bexp_more", sa.Column("id", sa.Integer, primary_key=True))
    op.execute("UPDATE bexp_jobs SET note = 'old'")
"""
BEFORE, AFTER = 4, 8
"""Explorations that are to be finished before the upgrade, and after it."""


def version_with(folder: Path, *, keep: Callable[[str], bool], later: str | None = None) -> ModuleType:
    """The module of the schema as another version has it: with the migrations to `keep`, and perhaps a `later` one."""
    shutil.copytree(schema._MIGRATIONS, folder)
    for path in (folder / "versions").glob("v*.py"):
        if not keep(path.name[1:5]):
            path.unlink()
    if later is not None:
        text = ADDITIVE.format(revision=later, before=latest_revision())
        (folder / "versions" / f"v{later}_more.py").write_text(text)
    spec = importlib.util.spec_from_file_location(f"schema_of_{folder.name}", schema.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module)["_MIGRATIONS"] = folder
    return module


def in_generation(number: int) -> str:
    """A revision of the latest generation."""
    return f"{latest_revision()[:2]}{number}"


class Load:
    """An API process and workers of this version, which go on until `stop`."""

    def __init__(self, client: TestClient, queue: Queue) -> None:
        self._client = client
        self._queue = queue
        self._stopping = threading.Event()
        self._all_submitted = threading.Event()
        self.submitted: list[str] = []
        self.finished: list[str] = []
        self.statuses: set[int] = set()

    def stop(self) -> None:
        self._stopping.set()

    def submit(self) -> None:
        try:
            while not self._stopping.is_set():
                answer = self._client.post("/v1/explorations", json=REQUEST | {"fresh": True})
                self.submitted.append(answer.json()["id"])
                for path in ("/v1/explorations", f"/v1/explorations/{self.submitted[-1]}", "/readyz"):
                    self.statuses.add(self._client.get(path).status_code)
        finally:
            self._all_submitted.set()

    def work(self, worker: str) -> None:
        info = make_worker(worker, fingerprint=make_report().hardware.fingerprint)
        ends_at = time.monotonic() + PATIENCE_SECONDS
        while not (self._all_submitted.is_set() and len(self.finished) == len(self.submitted)):
            assert time.monotonic() < ends_at, "another worker has failed"
            claim = self._queue.claim(info)
            if claim is None:
                continue
            self._queue.pin(claim.lease, make_report())
            for number in range(2):
                self._queue.record(claim.lease, make_progress(number))
            self._queue.heartbeat(claim.lease)
            self._queue.finish(claim.lease, JobState.SUCCEEDED, answer=ANSWER)
            self.finished.append(claim.job.id)


@pytest.mark.slow
def test_an_api_and_workers_go_on_while_a_later_version_upgrades_the_schema(
    database_url: str, open_url: Callable[[str], Database], tmp_path: Path
) -> None:
    database, later_database = open_url(database_url), open_url(database_url)
    later = version_with(tmp_path / "later", keep=lambda _: True, later=in_generation(99))
    assert not later.is_current(later_database)
    with in_process(ServiceSettings(database_url), raise_server_exceptions=False) as client:
        load = Load(client, Queue(database))
        with ThreadPoolExecutor(3) as pool:
            running = [pool.submit(load.submit), pool.submit(load.work, "a"), pool.submit(load.work, "b")]
            try:
                wait_for(load, running, BEFORE)
                later.upgrade(later_database)
                wait_for(load, running, len(load.finished) + AFTER)
            finally:
                load.stop()
            for one in running:
                one.result()
        assert load.statuses == {200}, "the API answers, and is ready"
    assert sorted(load.finished) == sorted(load.submitted)
    for job_id in load.finished:
        assert codes(database, job_id) == [101, 102, 201, 201, 401], "no gap and one end"
    assert later.is_current(later_database)
    assert is_current(database)
    upgrade(database)  # a process of the earlier version that starts now
    with database.read() as connection:
        notes = set(connection.scalars(sa.text("SELECT note FROM bexp_jobs")))
    assert notes == {"old", "none"}, "written before the upgrade, and after it"


def test_an_upgrade_gives_way_to_a_request_that_has_read_one_table_and_wants_another(
    postgresql_url: str, open_url: Callable[[str], Database], tmp_path: Path
) -> None:
    """The upgrade changes jobs before workers, and the request reads workers before jobs."""
    database, later_database = open_url(postgresql_url), open_url(postgresql_url)
    later = version_with(tmp_path / "later", keep=lambda _: True, later=in_generation(99))
    waiting = sa.text("SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'bexp_workers'::regclass")
    with ThreadPoolExecutor(1) as pool:
        with database.read() as request:
            request.execute(sa.text("SELECT name FROM bexp_workers"))
            upgrade = pool.submit(later.upgrade, later_database)
            with open_url(postgresql_url).read() as other:
                wait_until(lambda: bool(other.scalar(waiting)) or upgrade.done())
            assert not upgrade.done()
            assert request.scalar(sa.text("SELECT count(*) FROM bexp_jobs")) == 0
        upgrade.result()
    assert later.is_current(later_database)


def wait_for(load: Load, running: Sequence[Future[None]], number: int) -> None:
    pause = threading.Event()
    while len(load.finished) < number and not any(one.done() for one in running):
        pause.wait(0.005)


def test_migrations_of_a_generation_only_add_what_earlier_versions_can_leave_alone(
    empty_database_url: str, open_url: Callable[[str], Database], tmp_path: Path
) -> None:
    database = open_url(empty_database_url)
    first = min(revision for revision in schema._revisions() if revision[:2] == latest_revision()[:2])
    version_with(tmp_path / "first", keep=lambda revision: revision <= first).upgrade(database)
    before = columns_of(database)
    upgrade(database)
    after = columns_of(database)
    for table, columns in before.items():
        for name, (form, may_be_absent) in columns.items():
            assert after[table][name][0] == form, f"{table}.{name}"
            assert after[table][name][1] >= may_be_absent, f"{table}.{name}"
        for name in after[table].keys() - columns:
            assert after[table][name][1], f"{table}.{name}: an earlier version writes rows without it"


def columns_of(database: Database) -> dict[str, dict[str, tuple[str, bool]]]:
    """The type of each column, and whether a row may be written without it."""
    inspector = sa.inspect(database.engine)
    return {
        table: {
            column["name"]: (str(column["type"]), column["nullable"] or column["default"] is not None)
            for column in inspector.get_columns(table)
        }
        for table in inspector.get_table_names()
        if table.startswith(PREFIX)
    }


def test_a_schema_of_the_next_generation_is_refused(database: Database, tmp_path: Path) -> None:
    next_generation = f"{int(latest_revision()[:2]) + 1:02}01"
    later = version_with(tmp_path / "later", keep=lambda _: True, later=next_generation)
    later.upgrade(database)
    assert not is_current(database)
    with pytest.raises(NewerSchemaError, match="a later version of bexp has upgraded the database"):
        upgrade(database)
    job, _ = Queue(database).enqueue(make_request())
    with pytest.raises(NewerSchemaError):
        Queue(database).claim(make_worker())
    assert codes(database, job.id) == [101], "a worker of the later version takes it"
