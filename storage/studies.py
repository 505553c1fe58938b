"""The Optuna studies of a job, written into Optuna's own tables when somebody asks for them.

A job's trials are the truth, and a worker keeps its studies in memory. So no worker writes to Optuna's tables, and
nothing depends on them: a study can be dropped and written again at any time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import optuna
import sqlalchemy as sa
from filelock import Timeout
from optuna.storages import RDBStorage

from bexp.explorer.model.model import Variant
from bexp.explorer.records.trial import Trial, TrialKind
from bexp.explorer.search.legal_space import explored_models
from bexp.explorer.search.study import OFF, PARAMETERS, distributions, frozen_trial, params_of
from bexp.storage.database import SQLITE_BUSY_TIMEOUT, UNPREPARED, Database, DatabaseLimits
from bexp.storage.jobs import Job, JobNotFoundError, get_job
from bexp.storage.schema import exclusive
from bexp.storage.trials import read_all_trials

DROP_SECONDS = 3.0
"""The wait of a deletion, for which a client waits, until other processes have written their studies."""


@dataclass(frozen=True, slots=True)
class StudyLocation:
    """The place of a job's studies for Optuna: the storage URL without its password, and the studies' names."""

    url: str
    names: tuple[str, ...]


def write_studies(database: Database, job_id: str) -> StudyLocation:
    """Write the studies of a job so that Optuna's own tools can open them; the names are empty without trials.

    Existing studies stay if they have every trial; else they are written anew.
    """
    try:
        job = get_job(database, job_id)
    except JobNotFoundError:
        return StudyLocation(_display_url(database), ())
    trials = [trial for trial in read_all_trials(database, job_id) if trial.kind is TrialKind.COMPONENTS]
    with exclusive(database), _storage(database) as storage:
        if storage.get_current_version() != storage.get_head_version():
            storage.upgrade()
        names = []
        for suffix, members in _by_variant(job, trials).items():
            name = study_name(job_id, suffix)
            _write(storage, name, members, {} if suffix else job.space or {})
            names.append(name)
    return StudyLocation(_display_url(database), tuple(names))


def drop_studies(database: Database, job_ids: Collection[str]) -> int:
    """Drop the studies of jobs from Optuna's tables; return how many there were.

    Raises:
        sqlalchemy.exc.SQLAlchemyError: another process writes studies, or upgrades the schema, for too long.
    """
    with database.read() as connection:
        if not sa.inspect(connection).has_table("studies"):
            return 0
        studies = sa.table("studies", sa.column("study_name", sa.String))
        names = [name for name in connection.scalars(sa.select(studies.c.study_name)) if _job_of(name) in job_ids]
    if names:
        try:
            with exclusive(database, wait_seconds=DROP_SECONDS), _storage(database) as storage:
                for name in names:
                    with suppress(KeyError):  # another process has dropped it meanwhile
                        optuna.delete_study(study_name=name, storage=storage)
        except Timeout:
            raise sa.exc.TimeoutError(
                f"database is locked: its studies are not free within {DROP_SECONDS:g} s"
            ) from None
    return len(names)


def study_name(job_id: str, suffix: str = "") -> str:
    """Return the name of a study: `<job_id>` for the main variant, `<job_id>/<suffix>` for another."""
    return f"{job_id}/{suffix}" if suffix else job_id


def _job_of(name: str) -> str:
    return name.partition("/")[0]


def _by_variant(job: Job, trials: Sequence[Trial]) -> dict[str, list[Trial]]:
    """Return the trials of each variant by the suffix of its study's name, which is empty for the main one."""
    if job.request is not None and job.report is not None:
        main: Variant | None = explored_models(job.request, job.report)[0].variant
    else:  # another version stored the request; the main variant is explored first
        main = trials[0].candidate.variant if trials else None
    by_variant: dict[str, list[Trial]] = {}
    for trial in trials:
        variant = trial.candidate.variant
        by_variant.setdefault("" if variant == main else variant.describe(), []).append(trial)
    return by_variant


def _write(storage: RDBStorage, name: str, trials: Sequence[Trial], space: Mapping[str, Any]) -> None:
    known = {study.study_name for study in storage.get_all_studies()}
    if name in known:
        study = optuna.load_study(study_name=name, storage=storage)
        if len(study.get_trials(deepcopy=False)) == len(trials):
            return
        optuna.delete_study(study_name=name, storage=storage)
    study = optuna.create_study(storage=storage, study_name=name, direction="maximize")
    tried = [params_of(trial.candidate) for trial in trials]
    legal = {
        name: [OFF if value is None else value for value in space.get(PARAMETERS[name], ())] for name in PARAMETERS
    }
    choices = distributions({name: {*legal[name], *(params[name] for params in tried)} for name in PARAMETERS})
    study.add_trials(frozen_trial(trial, params, choices) for trial, params in zip(trials, tried, strict=True))


def _display_url(database: Database) -> str:
    url = database.engine.url.set(password=None) if database.is_postgresql else database.engine.url
    url = url.difference_update_query(["password", "sslpassword"])  # libpq takes them there, too
    return url.render_as_string()


@contextmanager
def _storage(database: Database) -> Iterator[RDBStorage]:
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # it would announce every study on stderr
    timeout = "connect_timeout" if database.is_postgresql else "timeout"
    seconds = int((DatabaseLimits().connect if database.is_postgresql else SQLITE_BUSY_TIMEOUT).total_seconds())
    # Optuna formats the URL as a template.
    url = database.url.replace("{", "{{").replace("}", "}}")
    options = {"connect_args": {timeout: seconds, **(UNPREPARED if database.is_postgresql else {})}}
    storage = RDBStorage(url, engine_kwargs=options, skip_compatibility_check=True)
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()
