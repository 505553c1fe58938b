"""Who can read what the product keeps: this user alone, whatever the umask."""

from __future__ import annotations

import ast
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bexp.api.background import LogFolder
from bexp.api.run_log import RunLog
from bexp.private_files import make_private_folder, private
from bexp.storage.database import Database, open_database
from bexp.storage.queue import Queue
from bexp.storage.schema import upgrade
from bexp.workers.process.kernel_cache import FOLDER_VARIABLE, kernel_cache
from tests.contracts.samples import make_request

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def generous_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder: Path) -> set[int]:
    """The modes of all that is in a folder, with that of the folder."""
    return {stat.S_IMODE(path.lstat().st_mode) for path in (folder, *folder.rglob("*"))}


def test_each_folder_that_is_missing_is_made_for_this_user_and_no_other_is_changed(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for _ in range(2):
        make_private_folder(tmp_path / "a" / "b" / "c")
    assert (modes(tmp_path / "a"), stat.S_IMODE(tmp_path.stat().st_mode)) == ({0o700}, 0o755)
    (tmp_path / "file").touch(0o644)
    with pytest.raises(OSError, match=r"exists|directory"):
        make_private_folder(tmp_path / "file" / "a")
    with open(tmp_path / "file", "w", opener=private), open(tmp_path / "new", "w", opener=private):
        assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("file", "new")] == [0o644, 0o600]


def keep_logs(folder: Path, queue: Queue) -> None:
    queue.enqueue(make_request())
    LogFolder(queue.database, folder / "logs").write()


def keep_a_database(folder: Path, _: Queue) -> None:
    database = open_database(f"sqlite:///{folder}/share/bexp/bexp.db")
    upgrade(database)
    database.dispose()


def keep_kernels(folder: Path, _: Queue) -> None:
    assert kernel_cache({FOLDER_VARIABLE: str(folder / "cache" / "kernels")})


@pytest.mark.parametrize("keep", [keep_logs, keep_a_database, keep_kernels])
def test_what_is_kept_is_for_this_user_alone(
    tmp_path: Path, sqlite_database: Database, keep: Callable[[Path, Queue], None]
) -> None:
    folder = tmp_path / "kept"
    folder.mkdir(mode=0o700)
    keep(folder, Queue(sqlite_database))
    assert len(list(folder.rglob("*"))) > 1
    assert modes(folder) <= {0o700, 0o600}


def test_a_log_that_others_may_read_stays_so(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.touch(0o644)
    with RunLog(path) as log:
        assert log.is_writing
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


IN_A_TEMPORARY_FOLDER = {
    "api/agents/commands.py",
    "api/cli/tune.py",
    "api/local_worker.py",
    "bexp/tune/link.py",
    "bexp/tune/waiting.py",
    "workers/targets/custom/command.py",
}
NAMED_BY_A_PERSON = {"api/cli/report.py", "api/cli/tune_answer.py", "bexp/config_exploration.py"}
"""What a command writes where it is told to: its mode is the umask's, or that of the file whose copy it is."""
OF_THE_KERNEL = {"bexp/tune/peak.py"}
"""It writes below /proc."""
WRITES = {"write_text", "write_bytes", "mkdir", "makedirs", "touch"}


def test_no_other_file_is_made() -> None:
    found = set[str]()
    for folder in ("api", "bexp", "explorer", "storage", "workers"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            may_make_one = any(word in text for word in (*WRITES, "open"))
            if may_make_one and any(makes_a_file(node) for node in ast.walk(ast.parse(text))):
                found.add(path.relative_to(ROOT).as_posix())
    assert found == IN_A_TEMPORARY_FOLDER | NAMED_BY_A_PERSON | OF_THE_KERNEL | {"bexp/private_files.py"}


def makes_a_file(node: ast.AST) -> bool:
    """Whether it makes a file or a folder, and the umask decides who can read that."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name)) if name in WRITES:
            return True
        case ast.Call(func=ast.Name(id="open") | ast.Attribute(attr="open"), args=given, keywords=keywords):
            opens = [each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            is_private = any(ast.unparse(each) == "opener=private" for each in keywords)
            return not is_private and any(set("wax") & set(mode) and len(mode) <= 3 for mode in opens)
    return False
