"""Explorations by the id that a person types: whole, its first characters, or `latest`."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from itertools import islice

from bexp.api.cli.errors import CommandError, ExitCode
from bexp.client.errors import ProblemError
from bexp.client.explorations import Exploration, Explorations

LATEST = "latest"
MOST_SEARCHED = 2000
"""The number of newest explorations that the first characters of an id may mean."""
FEWEST_CHARACTERS = 4
MOST_NAMED = 5


def find_job(client: Explorations, given: str) -> Exploration:
    """Return the exploration that `given` means.

    Raises CommandError if there is none for `latest` or if several begin alike, and ProblemError if the id is unknown.
    """
    if given == LATEST:
        newest = next(client.list(), None)
        if newest is None:
            raise CommandError(ExitCode.USAGE, "there is no exploration yet")
        return client.get(newest.id)
    try:
        return client.get(given)
    except ProblemError as error:
        if error.status != HTTPStatus.NOT_FOUND or len(given) < FEWEST_CHARACTERS:
            raise
    searched = islice(client.list(), MOST_SEARCHED)
    return client.get(_only(given, [job.id for job in searched if job.id.startswith(given)]))


def _only(given: str, job_ids: Sequence[str]) -> str:
    if not job_ids:
        raise CommandError(ExitCode.USAGE, f"no exploration begins with {given!r}; `bexp list` shows them")
    if len(job_ids) > 1:
        named = ", ".join(job_ids[:MOST_NAMED]) + (", ..." if len(job_ids) > MOST_NAMED else "")
        raise CommandError(ExitCode.USAGE, f"several explorations begin with {given!r}: {named}")
    return job_ids[0]
