"""The command line: `bexp`."""

from __future__ import annotations

import typer

from api.cli import administration, explore, jobs, service
from api.cli.errors import GuardedGroup

app = typer.Typer(
    name="bexp",
    cls=GuardedGroup,
    help="What is the best micro_batch_size? Measured on real kernels.",
    epilog=(
        "Exit codes: 0 answer, 1 no answer (nothing fits, or cancelled), 2 wrong usage, 3 the service failed. "
        "Environment: BEXP_DATABASE_URL, BEXP_API_URL, BEXP_API_TOKEN."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("explore")(explore.explore)
app.command("submit")(jobs.submit)
app.command("watch")(jobs.watch)
app.command("best")(jobs.best)
app.command("list")(jobs.list_)
app.command("cancel")(jobs.cancel)
app.command("serve")(service.serve)
app.command("worker")(service.worker)
app.command("doctor")(service.doctor)
app.add_typer(administration.token_commands, name="token")
app.add_typer(administration.database_commands, name="db")


def main() -> None:
    """The console script."""
    app()
