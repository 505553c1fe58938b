"""Optuna's tables in the same database: a projection of our trials that Optuna's own tools can open."""

from __future__ import annotations

from typing import Any

import optuna
import sqlalchemy as sa
from optuna.samplers import BaseSampler
from optuna.storages import RDBStorage

from storage.database import SQLITE_BUSY_TIMEOUT, Database


class StudyOpener:
    """Opens the studies of one job. Optuna commits in sessions of its own: never call it inside a transaction."""

    def __init__(self, database: Database, job_id: str) -> None:
        with database.read() as connection:
            if not has_study_tables(connection):
                raise RuntimeError("the database has no tables for studies: its schema is not up to date")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._storage = _open_storage(database, skip_compatibility_check=True, skip_table_creation=True)
        self._job_id = job_id

    def __call__(self, suffix: str, sampler: BaseSampler) -> optuna.Study:
        """Create or load the study `<job_id>`, or `<job_id>/<suffix>` when there is a suffix."""
        return optuna.create_study(
            storage=self._storage,
            sampler=sampler,
            study_name=f"{self._job_id}/{suffix}" if suffix else self._job_id,
            direction="maximize",
            load_if_exists=True,
        )

    def close(self) -> None:
        """Close Optuna's connections; studies that were opened are unusable from then on."""
        self._storage.remove_session()
        self._storage.engine.dispose()


def study_opener(database: Database, job_id: str) -> StudyOpener:
    """What opens the studies of `job_id`; nothing is created but the studies themselves.

    Raises:
        RuntimeError: the schema is not up to date.
    """
    return StudyOpener(database, job_id)


def create_study_tables(database: Database) -> None:
    """Create Optuna's tables, or bring them up to the installed version. One process at a time may do this."""
    storage = _open_storage(database, skip_compatibility_check=True)
    try:
        if storage.get_current_version() != storage.get_head_version():
            storage.upgrade()
    finally:
        storage.remove_session()
        storage.engine.dispose()


def has_study_tables(connection: sa.Connection) -> bool:
    """Whether `create_study_tables` has run."""
    return sa.inspect(connection).has_table("alembic_version")


def _open_storage(database: Database, **options: Any) -> RDBStorage:
    connect_args = {} if database.is_postgresql else {"timeout": SQLITE_BUSY_TIMEOUT.total_seconds()}
    # Optuna formats the URL as a template.
    url = database.url.replace("{", "{{").replace("}", "}}")
    return RDBStorage(url, engine_kwargs={"connect_args": connect_args}, **options)
