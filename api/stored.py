"""The explorations of a database for commands on its machine, with the answers of a service but without one."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from sqlalchemy.exc import SQLAlchemyError

from bexp.api import resources
from bexp.api.refusals import Problem, invalid_parameter, refusal_of
from bexp.client.errors import ProblemError, ServiceError
from bexp.client.explorations import Exploration, ExplorationSummary, Export, State, Worker
from bexp.explorer.exports.exploration import ExportSource
from bexp.explorer.exports.export import export
from bexp.explorer.formats.document import FormatError
from bexp.explorer.model.target import is_local_target
from bexp.explorer.records.event import Event
from bexp.explorer.records.run_report import RunReport
from bexp.explorer.records.trial import Trial
from bexp.explorer.request.labels import parse_label
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.trainers.document import ExportDocument
from bexp.storage.database import Database, describe_trouble
from bexp.storage.events import read_events
from bexp.storage.jobs import Job, JobFilter, JobState, JobSummary, get_job, get_summary, list_jobs
from bexp.storage.matching import share_job
from bexp.storage.owners import LOCAL, Caller
from bexp.storage.pruning import delete_job
from bexp.storage.queue import Queue
from bexp.storage.run_reports import read_run_reports
from bexp.storage.trials import read_all_trials
from bexp.storage.waiting import find_place, find_places
from bexp.storage.workers import read_workers

_NOTHING = {
    JobState.QUEUED: "The exploration has not started yet.",
    JobState.RUNNING: "The exploration has nothing to recommend yet.",
    JobState.FAILED: "The exploration failed before it had anything to recommend.",
    JobState.CANCELLED: "The exploration was cancelled before it had anything to recommend.",
}


def why_nothing(job: Job) -> str:
    """Return why nothing is recommended, in a sentence."""
    return _NOTHING.get(job.state, "The exploration ended without anything to recommend.")


def export_of(database: Database, job: Job, name: str) -> ExportDocument:
    """Return the answer of a job in the format called `name`.

    Raises:
        UnknownFormatError: there is no such format.
        ExportError: there is nothing that a trainer could run.
    """
    known = job.recommendation
    reason = job.answer.variants[0].reason if job.answer is not None and known is None else None
    trials = read_all_trials(database, job.reused_from or job.id) if known is not None else []
    source = ExportSource(
        id=job.id,
        request=job.request,
        report=job.report,
        recommendation=known,
        trials=trials,
        final=job.state.is_final,
        missing=f"Nothing fits: {reason}" if reason else why_nothing(job),
    )
    return export(name, source)


def export_notes(made: ExportDocument) -> tuple[str, ...]:
    """Return what belongs to an export whose format has no comments."""
    return () if made.has_header else tuple(made.header)


_KEY = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]{0,253}[\x21-\x7e])?")


def submit(
    queue: Queue,
    request: ExplorationRequest,
    *,
    idempotency_key: str | None = None,
    priority: int,
    by: Caller = LOCAL,
    job_id: str | None = None,
    own_worker: str = "",
) -> tuple[Job, bool]:
    """Queue an exploration; return its job, and whether it is new. `Queue.enqueue` explains the arguments.

    A target that is a file needs `own_worker`, a worker that the submitter starts on the machine of the file.

    Raises the errors that `bexp.api.refusals.refusal_of` knows.
    """
    if idempotency_key is not None and not _KEY.fullmatch(idempotency_key):
        raise invalid_parameter("Idempotency-Key", "must be 1 to 255 printable ASCII characters")
    if is_local_target(request.target_name) and not own_worker:
        where = "is a file on somebody's machine; `bexp explore` measures it there"
        raise FormatError([(("target",), f"'{request.target_name}' {where}")])
    return queue.enqueue(
        request, idempotency_key=idempotency_key, priority=priority, by=by, job_id=job_id, own_worker=own_worker
    )


POLL_SECONDS = 0.1


class StoredExplorations:
    """The explorations of one database, see `bexp.client.explorations.Explorations`."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.queue = Queue(database)

    def submit(
        self,
        request: ExplorationRequest,
        *,
        idempotency_key: str | None = None,
        priority: int = 0,
        job_id: str | None = None,
        own_worker: str = "",
    ) -> Exploration:
        """Submit an exploration. With `own_worker`, the submitter has started a worker of this name for it alone."""
        with _refusals():
            job, _ = submit(
                self.queue,
                request,
                idempotency_key=idempotency_key,
                priority=priority,
                job_id=job_id,
                own_worker=own_worker,
            )
            return self._shown(job)

    def get(self, job_id: str) -> Exploration:
        """Return one exploration."""
        with _refusals():
            return self._shown(get_job(self.database, job_id))

    def _shown(self, job: Job) -> Exploration:
        return resources.exploration_of(job, place=find_place(self.database, job))

    def summary(self, job_id: str) -> JobSummary:
        """Return the state of one exploration, which is read faster than the whole."""
        with _refusals():
            return get_summary(self.database, job_id)

    def list(
        self, *, state: State | None = None, model: str | None = None, labels: Sequence[str] = ()
    ) -> Iterator[ExplorationSummary]:
        """Yield the explorations that have each of `labels`, as `key=value`, the newest first."""
        wanted = JobFilter(None if state is None else JobState(state), model, tuple(map(parse_label, labels)))
        cursor = None
        while True:
            with _refusals():
                page, cursor = list_jobs(self.database, wanted=wanted, cursor=cursor)
                places = find_places(self.database, page)
            for job in page:
                yield resources.summary_of(job, places.get(job.id))
            if cursor is None:
                return

    def cancel(self, job_id: str, *, own_worker: str = "", has_ended: bool = False) -> Exploration:
        """Cancel an exploration; its worker stops within seconds.

        With `own_worker`, cancel it only if it is that worker's; `has_ended`: the process of that worker has ended.
        """
        with _refusals():
            return self._shown(self.queue.request_cancel(job_id, own_worker=own_worker, has_ended=has_ended))

    def resume(self, job_id: str, *, own_worker: str = "") -> Exploration:
        """Queue an exploration again that was cancelled or has failed; one that waits or runs stays where it is.

        With `own_worker`, the caller has started a worker of this name for it alone.
        """
        with _refusals():
            return self._shown(self.queue.resume(job_id, own_worker=own_worker))

    def share(self, job_id: str, *, own_worker: str) -> None:
        """Let any worker take an exploration that is reserved for `own_worker`, which has ended."""
        with _refusals():
            share_job(self.database, job_id, own_worker)

    def delete(self, job_id: str) -> None:
        """Delete an exploration that has ended, and all that belongs to it."""
        with _refusals():
            delete_job(self.database, job_id)

    def workers(self) -> tuple[Worker, ...]:
        """Return the workers that live, and those that were lost within a day."""
        with _refusals():
            return tuple(map(resources.worker_of, read_workers(self.database)))

    def export(self, job_id: str, name: str) -> Export:
        """Return the answer as a file for a training framework, in the format called `name`."""
        with _refusals():
            made = export_of(self.database, get_job(self.database, job_id), name)
            return Export(made.text, export_notes(made))

    def trials(self, job_id: str) -> tuple[Trial, ...]:
        """Return every trial that is stored so far, in the order of their numbers."""
        with _refusals():
            return tuple(read_all_trials(self.database, job_id))

    def run_reports(self, job_id: str) -> tuple[RunReport, ...]:
        """Return every report of a real run, in the order in which they arrived."""
        with _refusals():
            return tuple(stored.report for stored in read_run_reports(self.database, job_id))

    def events(
        self,
        job_id: str,
        *,
        after: int = 0,
        on_idle: Callable[[], None] = lambda: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Iterator[Event]:
        """Follow the events of an exploration to its end, each exactly once and in order.

        `on_idle` is called while there is nothing new, and may raise. The iterator ends early if `cancelled()`.
        """
        while not cancelled():
            with _refusals():
                now = get_summary(self.database, job_id)
                page = read_events(self.database, job_id, after=after)
            yield from page
            after = page[-1].seq if page else after
            if now.state.is_final and after >= now.last_seq:
                return
            if not page:
                on_idle()
                time.sleep(POLL_SECONDS)

    def stored_events(self, job_id: str) -> tuple[Event, ...]:
        """Return every event that is stored so far; unlike `events`, this does not wait for the end."""
        events: list[Event] = []
        with _refusals():
            while page := read_events(self.database, job_id, after=events[-1].seq if events else 0):
                events += page
        return tuple(events)


@contextmanager
def _refusals() -> Iterator[None]:
    """Raise ProblemError for what a service would refuse, and ServiceError if the database fails."""
    try:
        yield
    except Exception as error:  # `refusal_of` knows the kinds, and the rest is raised again
        refusal = refusal_of(error)
        if refusal is not None:
            problem = Problem.of(refusal.status, refusal.detail, name=refusal.name, errors=refusal.errors)
            raise ProblemError(refusal.status, problem.model_dump(mode="json", exclude_none=True)) from error
        if isinstance(error, SQLAlchemyError):
            raise ServiceError(f"the database cannot be used: {describe_trouble(error)}") from error
        raise
