"""Explorations by the id that a person types: whole, its first characters, or `latest`."""

from __future__ import annotations

from http import HTTPStatus

from api.cli.errors import CommandError, ExitCode
from api.client import Client, Job, ProblemError

LATEST = "latest"
MOST_SEARCHED = 2000
"""The newest explorations among which the first characters of an id are looked for."""
FEWEST_CHARACTERS = 4
MOST_NAMED = 5


def find_job(client: Client, given: str) -> Job:
    """Return the exploration that `given` means.

    Raises CommandError if there is none for `latest` or if several begin alike, and ProblemError if the id is unknown.
    """
    if given == LATEST:
        newest = client.list(limit=1).jobs
        if not newest:
            raise CommandError(ExitCode.USAGE, "there is no exploration yet")
        return client.get(newest[0].id)
    try:
        return client.get(given)
    except ProblemError as error:
        if error.status != HTTPStatus.NOT_FOUND or len(given) < FEWEST_CHARACTERS:
            raise
        found = _beginning_with(client, given)
        if not found:
            raise CommandError(
                ExitCode.USAGE, f"no exploration begins with {given!r}; `bexp list` shows them"
            ) from None
    if len(found) > 1:
        named = ", ".join(found[:MOST_NAMED]) + (", ..." if len(found) > MOST_NAMED else "")
        raise CommandError(ExitCode.USAGE, f"several explorations begin with {given!r}: {named}")
    return client.get(found[0])


def _beginning_with(client: Client, given: str) -> list[str]:
    found: list[str] = []
    cursor, searched = None, 0
    while searched < MOST_SEARCHED:
        page = client.list(limit=100, cursor=cursor)
        found += [job.id for job in page.jobs if job.id.startswith(given)]
        cursor, searched = page.next_cursor, searched + len(page.jobs)
        if cursor is None:
            break
    return found
