"""`bexp db`, `bexp study` and `bexp prune`: commands on the database itself, without a service."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import typer

from bexp.api.cli.arguments import AsJson, JobId
from bexp.api.cli.connection import open_storage, open_stored
from bexp.api.cli.errors import CommandError, ExitCode, say
from bexp.api.cli.job_ids import find_job
from bexp.api.cli.results import print_json

database_commands = typer.Typer(no_args_is_help=True)


@database_commands.command("upgrade")
def upgrade() -> None:
    """Bring the tables up to date; several processes may do so at once.

    Example: bexp db upgrade
    """
    with open_storage():
        say("the database is up to date")


def study(job_id: JobId, as_json: AsJson = False) -> None:
    """Write the Optuna study of an exploration into the database, for optuna-dashboard and other Optuna tools.

    Example: bexp study latest
    """
    from bexp.storage.studies import write_studies  # noqa: PLC0415 - for this command alone

    with open_stored() as stored:
        written = write_studies(stored.database, find_job(stored, job_id).id)
    if not written.names:
        raise CommandError(ExitCode.USAGE, f"there is no study of an exploration {job_id!r}")
    if as_json:
        print_json({"storage": written.url, "studies": written.names})
        return
    typer.echo(f"storage  {written.url}")
    for name in written.names:
        typer.echo(f"study    {name}")
    say(f"open it with: optuna-dashboard --host 127.0.0.1 '{written.url}'")


def prune(
    older_than_days: Annotated[
        float | None,
        typer.Option(
            min=0, max=36_500, metavar="DAYS", help="Delete what is older: finished explorations, measured components."
        ),
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Keep only N finished ones: the newest, as many of each owner."),
    ] = None,
    studies: Annotated[
        bool, typer.Option("--studies", help="Drop the Optuna studies of all finished ones; `bexp study` rewrites one.")
    ] = False,
    audit_older_than_days: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=36_500,
            metavar="DAYS",
            help="Delete records of `bexp audit` that are older. Without this option: than 365 days.",
        ),
    ] = None,
    components: Annotated[
        bool, typer.Option("--components", help="Forget all measured components, which later explorations would reuse.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say how many would be deleted.")] = False,
) -> None:
    """Delete finished explorations with their logs, trials, run reports and studies, old records of the audit, and
    measured components.

    Example: bexp prune --older-than-days 90 --keep 10000 --dry-run
    """
    from bexp.storage.audit import KEEP_AUDIT, prune_audit  # noqa: PLC0415 - for this command alone
    from bexp.storage.components import prune_components  # noqa: PLC0415 - for this command alone
    from bexp.storage.pruning import drop_finished_studies, find_prunable  # noqa: PLC0415 - for this command alone
    from bexp.storage.pruning import prune as prune_jobs  # noqa: PLC0415 - for this command alone

    if older_than_days is None and keep is None and audit_older_than_days is None and not (studies or components):
        what = "--older-than-days DAYS, --keep NEWEST, --studies, --components, or --audit-older-than-days DAYS"
        raise CommandError(ExitCode.USAGE, f"say what to delete: {what}")
    kept = KEEP_AUDIT if audit_older_than_days is None else timedelta(days=audit_older_than_days)
    older_than = None if older_than_days is None else timedelta(days=older_than_days)
    with open_storage() as database:
        prunable = find_prunable(database, older_than=older_than, keep=keep)
        if dry_run:
            say(f"{_explorations(len(prunable))} would be deleted")
            return
        prune_jobs(database, prunable)
        if older_than is not None or keep is not None:
            say(f"deleted {_explorations(len(prunable))}")
        if num_records := prune_audit(database, kept):
            say(f"records of the audit deleted: {num_records}")
        if components or older_than is not None:
            num_components = prune_components(database, older_than=None if components else older_than)
            say(f"measured components deleted: {num_components}")
        if studies:
            say(f"Optuna studies dropped: {drop_finished_studies(database)}")


def _explorations(count: int) -> str:
    return f"{count} exploration{'' if count == 1 else 's'}"
