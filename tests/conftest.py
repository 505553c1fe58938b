"""What all tests share: a temporary directory of each test process's own, and a fresh database each test."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable, Generator, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from bexp.storage.database import Database, open_database
from bexp.storage.schema import upgrade
from tests.fresh_postgresql import FreshDatabases, execute, with_name

_MEMORY = Path("/dev/shm")
"""A file system that takes a tenth of a disk's processor time for each of the many transactions that tests commit."""
_NEEDED_BYTES = 4 * 2**30


def pytest_configure() -> None:
    """Keep test processes that run in parallel apart, and their children like those of a person's terminal."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts background commands so, and children inherit it: they would not hear of Ctrl-C.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    base = tempfile.gettempdir() if "TMPDIR" in os.environ or not _can_hold_tests(_MEMORY) else str(_MEMORY)
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", base)  # what failed tests wrote stays for people to read
    folder = Path(tempfile.mkdtemp(prefix="bexp-tests-", dir=base))
    folder.chmod(0o711)  # PostgreSQL runs as a user of its own and has its data below
    atexit.register(shutil.rmtree, folder, ignore_errors=True)  # after all that ends with the process and writes there
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    # Tests that shared the locks of devices with other programs would wait for their explorations.
    os.environ["BEXP_LOCK_DIRECTORY"] = str(folder)


def _can_hold_tests(folder: Path) -> bool:
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        return False
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize >= _NEEDED_BYTES and not found.f_flag & os.ST_NOEXEC


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave what imports make out of garbage collections, each of which would take half a second otherwise."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """Leave what a file has imported and keeps out of garbage collections too: timings begin with one each."""
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path != item.path:
            gc.collect()
            gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the slow tests, a share in each process: one that began last would end alone."""
    slow: dict[str, list[pytest.Item]] = {}
    others: list[pytest.Item] = []
    for item in items:
        mark = item.get_closest_marker("slow")
        if mark is None:
            others.append(item)
        else:
            together = mark.kwargs.get("together", item.nodeid)
            slow.setdefault(str(item.path) if together is True else together, []).append(item)
    number = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    left, pieces = iter(others), list[pytest.Item]()
    for i in range(number):  # at first, each process is given a part of the list in one piece
        first = [item for tests in list(slow.values())[i::number] for item in tests]
        length = (len(items) - len(pieces)) // (number - i)
        pieces += [*first, *islice(left, max(0, length - len(first)))]
    items[:] = [*pieces, *left]


class Statements(dict[Any, Any]):
    """What SQLAlchemy has compiled, by statement and kind of database; it would keep it by engine."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def get(self, key: tuple[Any, ...], default: Any = None) -> Any:
        return super().get((self._kind, *key[1:]), default)

    def __setitem__(self, key: tuple[Any, ...], compiled: Any) -> None:
        super().__setitem__((self._kind, *key[1:]), compiled)


@pytest.fixture(autouse=True)
def quiet_workers() -> Iterator[None]:
    """Restore what a worker that a test starts in this process logs; later tests compare their logs."""
    logger = logging.getLogger("bexp.workers")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def compiled_once() -> Iterator[None]:
    """Compile each statement once for the databases of all tests. A small test would spend half of its time on that."""
    statements: dict[str, Statements] = {}

    def open_one(database: Database, engine: sa.Engine, *arguments: Any) -> None:
        kind = engine.dialect.name
        engine.update_execution_options(compiled_cache=statements.setdefault(kind, Statements(kind)))
        init(database, engine, *arguments)

    init = Database.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Database, "__init__", open_one)
        yield


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[str]:
    """The URL of a PostgreSQL server's first database."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # platformdirs, imported by pgserver, wants XDG_RUNTIME_DIR
        from pgserver import postgres_server
    folder = Path(tempfile.mkdtemp(prefix="bexp-pg-"))  # not below pytest's folder, which the server may not enter
    server = postgres_server.get_server(folder, cleanup_mode="stop")
    try:
        for setting in ("fsync", "full_page_writes", "synchronous_commit"):
            execute(server.get_uri(), f"ALTER SYSTEM SET {setting} = off")
        execute(server.get_uri(), "SELECT pg_reload_conf()")
        yield str(server.get_uri())
    finally:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgresql_databases(postgresql_server: str) -> FreshDatabases:
    """Databases with the current schema."""
    name = "bexp_template"
    execute(postgresql_server, f"CREATE DATABASE {name}")
    database = open_database(with_name(postgresql_server, name))
    upgrade(database)
    database.dispose()
    return FreshDatabases(postgresql_server, name)


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the current schema."""
    path = tmp_path_factory.mktemp("sqlite") / "template.db"
    database = open_database(f"sqlite:///{path}")
    upgrade(database)
    database.dispose()
    return path


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database without tables; each test runs on SQLite and on PostgreSQL."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'bexp.db'}"
        return
    with FreshDatabases(request.getfixturevalue("postgresql_server"), "template1").one() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database with the current schema; each test runs on SQLite and on PostgreSQL."""
    if request.param == "sqlite":
        yield _copy_sqlite(request.getfixturevalue("sqlite_template"), tmp_path)
        return
    databases: FreshDatabases = request.getfixturevalue("postgresql_databases")
    with databases.one() as url:
        yield url


@pytest.fixture
def postgresql_url(postgresql_databases: FreshDatabases) -> Iterator[str]:
    """A PostgreSQL database with the current schema."""
    with postgresql_databases.one() as url:
        yield url


@pytest.fixture
def database(open_url: Callable[[str], Database], database_url: str) -> Database:
    """An open database with the current schema; each test runs on SQLite and on PostgreSQL."""
    return open_url(database_url)


@pytest.fixture
def sqlite_url(sqlite_template: Path, tmp_path: Path) -> str:
    """A SQLite database with the current schema."""
    return _copy_sqlite(sqlite_template, tmp_path)


@pytest.fixture
def sqlite_database(open_url: Callable[[str], Database], sqlite_url: str) -> Database:
    """An open SQLite database with the current schema."""
    return open_url(sqlite_url)


@pytest.fixture
def open_url() -> Iterator[Callable[[str], Database]]:
    """`open_database`, with the connections closed at the end of the test."""
    opened: list[Database] = []

    def open_one(url: str) -> Database:
        opened.append(open_database(url))
        return opened[-1]

    yield open_one
    for database in opened:
        database.dispose()


def _copy_sqlite(template: Path, folder: Path) -> str:
    path = folder / "bexp.db"
    shutil.copyfile(template, path)
    return f"sqlite:///{path}"
