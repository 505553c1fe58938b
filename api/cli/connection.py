"""The service that a command talks to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bexp.api.cli.errors import CommandError, ExitCode
from bexp.api.client import Client, ServiceError
from bexp.api.embedded import EmbeddedService
from bexp.api.settings import DEFAULT_API_URL, Environment, read_environment
from bexp.client.address import without_secrets


def environment() -> Environment:
    """Return the settings of the environment; a wrong one is a usage error."""
    try:
        return read_environment()
    except ValueError as error:
        raise CommandError(ExitCode.USAGE, str(error)) from None


@contextmanager
def connect() -> Iterator[Client]:
    """Connect to the service at BEXP_API_URL, or at the default address.

    Raises ServiceError when nothing answers there.
    """
    told = environment()
    with Client(told.api_url, told.api_token) as client:
        try:
            client.check_alive()
        except ServiceError as error:
            hint = (
                "\nset BEXP_API_URL if it is elsewhere, start one with `bexp serve` and `bexp worker`, or explore "
                "without one: `bexp explore CONFIG`"
            )
            raise ServiceError(f"{error}{hint if str(error).startswith('no service') else ''}") from error
        yield client


@contextmanager
def find_service() -> Iterator[Client | None]:
    """Connect as `connect` does, but yield null if nothing answers at the default address."""
    told = environment()
    if told.api_url != DEFAULT_API_URL:
        with connect() as client:
            yield client
        return
    with Client(told.api_url, told.api_token) as client:
        yield client if client.is_alive() else None


@contextmanager
def connect_or_embed() -> Iterator[Client]:
    """Connect as `connect` does, but if nothing answers at the default address, start an API on the same database."""
    with find_service() as found:
        if found is not None:
            yield found
            return
    with EmbeddedService(environment().database_url, with_worker=False) as service, Client(service.url) as client:
        yield client


def shown_url(database_url: str) -> str:
    """Return a database's URL without its user and query, which may hold passwords, or the path of a SQLite file."""
    if database_url.startswith("sqlite:///"):
        return database_url.removeprefix("sqlite:///").partition("?")[0]
    return without_secrets(database_url)
