"""Explorations by the id that a person types: whole, its first characters, or `latest`."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING

from bexp.api.cli.errors import CommandError, ExitCode
from bexp.api.client import Client, Job, ProblemError

if TYPE_CHECKING:
    from bexp.storage.database import Database

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
        return client.get(_latest([job.id for job in newest]))
    try:
        return client.get(given)
    except ProblemError as error:
        if error.status != HTTPStatus.NOT_FOUND or len(given) < FEWEST_CHARACTERS:
            raise
    return client.get(_only(given, _beginning_with(client, given)))


def find_stored_id(database: Database, given: str) -> str:
    """Return the id of the exploration in the database that `given` means, as `find_job` does with a service.

    Raises CommandError if there is none, or if several begin alike. An unknown id of fewer than FEWEST_CHARACTERS
    characters is returned as it is.
    """
    from bexp.storage.listing import ids_beginning_with, list_jobs  # noqa: PLC0415 - for one command alone

    if given == LATEST:
        page, _ = list_jobs(database, limit=1)
        return _latest([job.id for job in page])
    if len(given) < FEWEST_CHARACTERS:
        return given
    found = ids_beginning_with(database, given, limit=MOST_NAMED + 1)
    return given if given in found else _only(given, found)


def _latest(newest: Sequence[str]) -> str:
    if not newest:
        raise CommandError(ExitCode.USAGE, "there is no exploration yet")
    return newest[0]


def _only(given: str, found: Sequence[str]) -> str:
    if not found:
        raise CommandError(ExitCode.USAGE, f"no exploration begins with {given!r}; `bexp list` shows them")
    if len(found) > 1:
        named = ", ".join(found[:MOST_NAMED]) + (", ..." if len(found) > MOST_NAMED else "")
        raise CommandError(ExitCode.USAGE, f"several explorations begin with {given!r}: {named}")
    return found[0]


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
