"""The connection of a command to its explorations: at a service, or in the database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bexp.api.cli.errors import CommandError, ExitCode
from bexp.api.settings import Environment, read_environment
from bexp.client.address import without_secrets

if TYPE_CHECKING:
    from bexp.api.stored import StoredExplorations
    from bexp.client.explorations import Explorations
    from bexp.storage.database import Database


def environment() -> Environment:
    """Return the settings of the environment; a wrong one is a usage error."""
    try:
        return read_environment()
    except ValueError as error:
        raise CommandError(ExitCode.USAGE, str(error)) from None


@contextmanager
def connect() -> Iterator[Explorations]:
    """Return the explorations of the service that BEXP_API_URL names; without it, those of the database.

    Raises ServiceError if the service does not answer, CommandError if the database cannot be used.
    """
    variables = environment()
    if variables.api_url is None:
        with open_stored() as stored:
            yield stored
        return
    from bexp.client.client import Client  # noqa: PLC0415 - takes long, and only a service needs it

    with Client(variables.api_url, variables.api_token) as client:
        client.connection.check_alive()
        yield client


@contextmanager
def open_stored() -> Iterator[StoredExplorations]:
    """Return the explorations of the database that BEXP_DATABASE_URL names; default: a file of this user."""
    from bexp.api.stored import StoredExplorations  # noqa: PLC0415 - takes long, and a service needs no database

    with database_errors():
        database = open_current(environment().database_url)
    try:
        yield StoredExplorations(database)
    finally:
        database.dispose()


@contextmanager
def open_storage() -> Iterator[Database]:
    """Open the database of `open_stored`, for commands on the database itself."""
    with database_errors():
        database = open_current(environment().database_url)
        try:
            yield database
        finally:
            database.dispose()


def open_current(url: str) -> Database:
    """Return the database with its tables up to date."""
    from bexp.storage.database import open_database  # noqa: PLC0415 - few commands need SQL
    from bexp.storage.schema import upgrade  # noqa: PLC0415 - few commands need SQL

    database = open_database(url)
    upgrade(database)
    return database


@contextmanager
def database_errors() -> Iterator[None]:
    """Turn database errors into the end of the command."""
    from filelock import Timeout  # noqa: PLC0415 - few commands need SQL
    from sqlalchemy.exc import SQLAlchemyError  # noqa: PLC0415 - few commands need SQL

    from bexp.storage.database import describe_trouble  # noqa: PLC0415 - few commands need SQL

    try:
        yield
    except ValueError as error:
        raise CommandError(ExitCode.USAGE, str(error)) from None
    except Timeout:  # is an OSError
        raise CommandError(ExitCode.SERVICE, "another process has been upgrading the database for too long") from None
    except OSError as error:
        where = f"the database cannot be opened: {error.strerror}: {error.filename}"
        raise CommandError(ExitCode.SERVICE, where) from None
    except SQLAlchemyError as error:
        raise CommandError(ExitCode.SERVICE, f"the database cannot be used: {describe_trouble(error)}") from None


def shown_url(database_url: str) -> str:
    """Return a database's URL without its user and query, which may hold passwords, or the path of a SQLite file."""
    if database_url.startswith("sqlite:///"):
        return database_url.removeprefix("sqlite:///").partition("?")[0]
    return without_secrets(database_url)
