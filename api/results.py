"""The result of an exploration: its recommendation, and its answer as the configuration of a training framework."""

from __future__ import annotations

from bexp.explorer.exports.exploration import ExportSource
from bexp.explorer.exports.export import export
from bexp.explorer.trainers.document import ExportDocument
from bexp.storage.database import Database
from bexp.storage.jobs import Job, JobState
from bexp.storage.trials import read_all_trials

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
