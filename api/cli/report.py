"""`bexp report`: an exploration as one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bexp.api.cli.arguments import JobId
from bexp.api.cli.connection import connect
from bexp.api.cli.errors import CommandError, ExitCode, say
from bexp.api.cli.job_ids import find_job


def report(
    job_id: JobId,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where to write it.")] = Path("report.html"),
) -> None:
    """Write an exploration as one HTML file: the answer, the charts, the log and the trials.

    The file loads nothing from elsewhere. It holds the request and the names of the devices.

    Example: bexp report latest --out report.html
    """
    from bexp.api.web.report import render_report  # noqa: PLC0415 - for this command alone

    with connect() as client:
        job = client.get(find_job(client, job_id).id)
        trials = client.trials(job.id)
        events = client.stored_events(job.id)
    text = render_report(
        job.model_dump(mode="json"),
        [trial.model_dump(mode="json") for trial in trials],
        [event.model_dump(mode="json") for event in events],
    )
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(ExitCode.USAGE, f"cannot write {out}: {error.strerror}") from error
    say(f"wrote {out}")
