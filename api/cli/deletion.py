"""`bexp delete`: an exploration that is not needed any more."""

from __future__ import annotations

from bexp.api.cli.arguments import JobId
from bexp.api.cli.connection import connect
from bexp.api.cli.errors import CommandError, ExitCode, say
from bexp.api.cli.job_ids import find_job
from bexp.client.errors import ProblemError
from bexp.client.explorations import NOT_FINISHED


def delete(job_id: JobId) -> None:
    """Delete an exploration that has ended, with its log, trials, study and run reports.

    Example: bexp delete 9f1c2d3e
    """
    with connect() as client:
        job = find_job(client, job_id)
        try:
            client.delete(job.id)
        except ProblemError as error:
            if error.name != NOT_FINISHED:
                raise
            message = f"exploration {job.id} has not ended: end it first with `bexp cancel {job.id}`"
            raise CommandError(ExitCode.USAGE, message) from None
    say(f"exploration {job.id} is deleted")
