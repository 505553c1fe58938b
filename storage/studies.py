"""A copy of each job's Optuna study in Optuna's own tables, so that Optuna's tools can open it.

The trials in `storage.trials` are the truth. A job never reads the copy, so nothing depends on it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import optuna
import sqlalchemy as sa
from optuna.storages import RDBStorage
from optuna.study import Study

from explorer.search.optuna_trials import TRIAL_NUMBER
from storage.changes import fence
from storage.database import SQLITE_BUSY_TIMEOUT, Database
from storage.leases import Lease, LeaseLostError
from storage.tables import jobs

_log = logging.getLogger(__name__)


class StudyCopy:
    """Copies the studies of a job, under the worker's lease. A failure is logged and ends the copying; it never raises.

    Optuna commits in transactions of its own. Each of them begins by locking the job's row, if the lease is still held,
    so a worker that lost its lease writes nothing. Never call it inside a transaction.
    """

    def __init__(self, database: Database, lease: Lease) -> None:
        self._database = database
        self._lease = lease
        self._storage: RDBStorage | None = None
        self._copied: dict[str, set[int]] = {}
        self._failed = False

    def __call__(self, suffix: str, study: Study) -> None:
        """Add the finished trials of `study` that the copy lacks; `suffix` tells the job's studies apart."""
        if self._failed:
            return
        try:
            self._add_missing(study_name(self._lease.job_id, suffix), study)
        except Exception as error:  # noqa: BLE001 - nothing depends on the copy
            self._failed = True
            _log.warning("the Optuna study of exploration %s is not copied any further: %s", self._lease.job_id, error)

    def close(self) -> None:
        """Close Optuna's connections."""
        if self._storage is not None:
            _close(self._storage)

    def _add_missing(self, name: str, study: Study) -> None:
        trials = [t for t in study.get_trials(deepcopy=False) if t.state.is_finished() and TRIAL_NUMBER in t.user_attrs]
        fresh = [t for t in trials if t.user_attrs[TRIAL_NUMBER] not in self._copied.get(name, ())]
        if name in self._copied and not fresh:
            return
        copy = self._open(name)
        if name not in self._copied:
            self._copied[name] = {t.user_attrs.get(TRIAL_NUMBER, -1) for t in copy.get_trials(deepcopy=False)}
            fresh = [t for t in fresh if t.user_attrs[TRIAL_NUMBER] not in self._copied[name]]
        try:
            self._add(copy, name, fresh)
        except ValueError:  # another version began the copy, with other choices: they can never change
            optuna.delete_study(study_name=name, storage=self._open_storage())
            self._copied[name] = set()
            self._add(self._open(name), name, trials)

    def _add(self, copy: Study, name: str, trials: list[optuna.trial.FrozenTrial]) -> None:
        for trial in trials:
            copy.add_trial(trial)
            self._copied[name].add(trial.user_attrs[TRIAL_NUMBER])

    def _open(self, name: str) -> Study:
        return optuna.create_study(
            storage=self._open_storage(), study_name=name, direction="maximize", load_if_exists=True
        )

    def _open_storage(self) -> RDBStorage:
        if self._storage is None:
            with self._database.read() as connection:
                if not has_study_tables(connection):
                    raise RuntimeError("the database has no tables for studies: its schema is not up to date")
            self._storage = _open_storage(self._database, skip_compatibility_check=True, skip_table_creation=True)
            sa.event.listen(self._storage.engine, "begin", self._check_lease)
        return self._storage

    def _check_lease(self, connection: sa.Connection) -> None:
        """Lock the job's row for the transaction that begins.

        Raises:
            LeaseLostError: the lease is gone.
        """
        if not self._database.is_postgresql:
            # The driver would begin no transaction before the first write, which is after the lease was looked at.
            driver: Any = connection.connection.driver_connection
            driver.isolation_level = None
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        held = sa.select(jobs.c.id).where(*fence(self._lease)).with_for_update(read=True)
        if connection.execute(held).first() is None:
            raise LeaseLostError(self._lease)


@dataclass(frozen=True, slots=True)
class StudyLocation:
    """The place of a job's studies for Optuna: the storage URL without its password, and the studies' names."""

    url: str
    names: tuple[str, ...]


def locate_studies(database: Database, job_id: str) -> StudyLocation:
    """Where the studies of a job were copied to; no names if none was copied yet."""
    studies = sa.table("studies", sa.column("study_name", sa.String))
    mine = sa.or_(studies.c.study_name == job_id, studies.c.study_name.startswith(f"{job_id}/", autoescape=True))
    with database.read() as connection:
        names = connection.scalars(sa.select(studies.c.study_name).where(mine).order_by(studies.c.study_name))
        url = database.engine.url.set(password=None) if database.is_postgresql else database.engine.url
        url = url.difference_update_query(["password", "sslpassword"])  # libpq takes them there, too
        return StudyLocation(url.render_as_string(hide_password=True), tuple(names))


def study_name(job_id: str, suffix: str = "") -> str:
    """`<job_id>` for the main variant, `<job_id>/<suffix>` for another."""
    return f"{job_id}/{suffix}" if suffix else job_id


def create_study_tables(database: Database) -> None:
    """Create Optuna's tables, or bring them up to the installed version. One process at a time may do this."""
    with _storage(database) as storage:
        if storage.get_current_version() != storage.get_head_version():
            storage.upgrade()


def has_study_tables(connection: sa.Connection) -> bool:
    """Whether `create_study_tables` has run."""
    return sa.inspect(connection).has_table("alembic_version")


@contextmanager
def _storage(database: Database) -> Iterator[RDBStorage]:
    storage = _open_storage(database, skip_compatibility_check=True)
    try:
        yield storage
    finally:
        _close(storage)


def _open_storage(database: Database, **options: Any) -> RDBStorage:
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # it would announce every study on stderr
    connect_args = {} if database.is_postgresql else {"timeout": SQLITE_BUSY_TIMEOUT.total_seconds()}
    # Optuna formats the URL as a template.
    url = database.url.replace("{", "{{").replace("}", "}}")
    return RDBStorage(url, engine_kwargs={"connect_args": connect_args}, **options)


def _close(storage: RDBStorage) -> None:
    storage.remove_session()
    storage.engine.dispose()
