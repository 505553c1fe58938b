"""Who can read a SQLite database: the modes of its files, as they lie in the file system."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from bexp.storage.database import open_database
from bexp.storage.location import default_database_url
from bexp.storage.schema import is_current, upgrade


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def generous_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def reachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of everybody's; those of pytest above it are one user's."""
    real = os.stat

    def open_above(path: object, *args: object, **options: object) -> os.stat_result:
        found = real(path, *args, **options)  # type: ignore[arg-type]  # any arguments
        if Path(str(path)) in tmp_path.parents:
            found = os.stat_result((found.st_mode | 0o755, *found[1:]))
        return found

    monkeypatch.setattr(os, "stat", open_above)
    tmp_path.chmod(0o755)
    return tmp_path


def test_a_new_database_and_all_its_files_are_for_this_user_alone(tmp_path: Path) -> None:
    data_home = tmp_path / "share"
    data_home.mkdir(mode=0o755)
    database = open_database(default_database_url(str(data_home)))
    upgrade(database)
    folder = data_home / "bexp"
    assert (mode(data_home), mode(folder), mode(folder / "bexp.db")) == (0o755, 0o700, 0o600)
    with database.begin() as connection:  # its changes are in a journal until they are committed
        connection.exec_driver_sql("UPDATE bexp_schema_version SET version_num = version_num")
        files = {path.name: mode(path) for path in folder.iterdir()}
    database.dispose()
    assert set(files.values()) == {0o600}
    assert {"bexp.db", "bexp.db.upgrade.lock"} < set(files), "there is a journal"


def test_a_write_ahead_log_has_the_mode_of_its_database(tmp_path: Path) -> None:
    path = tmp_path / "bexp.db"
    database = open_database(f"sqlite:///{path}")
    upgrade(database)
    database.dispose()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("CREATE TABLE filled (value)")
    assert {mode(tmp_path / f"bexp.db{end}") for end in ("-wal", "-shm")} == {0o600}
    connection.close()


def test_a_folder_and_a_file_that_are_there_stay_as_they_are_and_one_line_says_so(
    reachable: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = reachable / "bexp.db"
    path.touch(mode=0o644)
    for _ in range(2):
        database = open_database(f"sqlite:///{path}")
        is_current(database)
        database.dispose()
    assert (mode(reachable), mode(path)) == (0o755, 0o644)
    assert [record.getMessage() for record in caplog.records] == [
        f"every user of this machine can read the database; to end that: chmod 600 {path}"
    ]


def test_nobody_is_warned_of_a_file_that_others_cannot_reach(reachable: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = reachable / "mine"
    folder.mkdir(mode=0o700)
    (folder / "bexp.db").touch(mode=0o644)
    open_database(f"sqlite:///{folder / 'bexp.db'}").dispose()
    (reachable / "bexp.db").touch(mode=0o640)
    open_database(f"sqlite:///{reachable / 'bexp.db'}").dispose()
    assert caplog.records == []
