"""The response with an answer as the configuration of a training framework."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import Response

from bexp.api.problems import ProblemException, invalid_parameter, readable
from bexp.client.headers import NOTE_HEADER
from bexp.explorer.exports.exploration import Exploration, ExportError, UnknownFormatError
from bexp.explorer.exports.registry import export
from bexp.storage.database import Database
from bexp.storage.jobs import Job
from bexp.storage.trials import read_all_trials

SUFFIXES = {
    "application/json": "json",
    "application/yaml": "yaml",
    "text/x-python": "py",
    "text/x-shellscript": "sh",
}


def export_response(database: Database, job: Job, name: str, missing: str) -> Response:
    """Return the answer of a job in the format called `name`; `missing` says why there is none, if there is none.

    Raises:
        ProblemException: 422 for an unknown format, 409 if there is nothing that a trainer could run.
    """
    known = job.recommendation if job.answer is None else job.answer.recommendation
    reason = job.answer.variants[0].reason if job.answer is not None and known is None else None
    trials = read_all_trials(database, job.reused_from or job.id) if known is not None else []
    found = Exploration(
        id=job.id,
        request=job.request,
        report=job.report,
        recommendation=known,
        trials=trials,
        final=job.state.is_final,
        missing=f"Nothing fits: {reason}" if reason else missing,
    )
    try:
        made = export(name, found)
    except UnknownFormatError as error:
        raise invalid_parameter("format", str(error)) from error
    except ExportError as error:
        raise ProblemException(HTTPStatus.CONFLICT, str(error), name="no-recommendation") from error
    filename = f"bexp-{name}.{SUFFIXES[made.media_type]}"
    response = Response(
        made.text, media_type=made.media_type, headers={"Content-Disposition": f'inline; filename="{filename}"'}
    )
    for line in () if made.has_header else made.header:
        response.headers.append(NOTE_HEADER, readable(line, 1000).encode("ascii", "replace").decode())
    return response
