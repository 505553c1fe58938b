"""`bexp log`: the log text of an exploration."""

from __future__ import annotations

import typer

from bexp.api.cli.arguments import JobId
from bexp.api.cli.connection import connect
from bexp.api.cli.job_ids import find_job
from bexp.explorer.records.event import render_line


def log(job_id: JobId) -> None:
    """Print the log of an exploration so far, a BEXP line for each event.

    Example: bexp log latest
    """
    with connect() as client:
        for event in client.stored_events(find_job(client, job_id).id):
            typer.echo(render_line(event))
