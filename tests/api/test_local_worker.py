"""How a command ends its worker: it is asked, and killed if it takes too long."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from bexp.api import local_worker
from bexp.api.local_worker import LocalWorker, WorkerEndedError

SLOW = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.1), sys.exit(7)))
print('ready', flush=True)
while True: time.sleep(9)
"""
RECORD = "2026-01-02 10:00:00,123 ERROR "
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(99)"


@pytest.mark.parametrize(("program", "grace", "status"), [(SLOW, 60.0, 7), (DEAF, 0.2, -9)])
def test_a_worker_may_end_by_itself_for_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, grace: float, status: int
) -> None:
    monkeypatch.setattr(local_worker, "GRACE_SECONDS", grace)
    monkeypatch.setattr(local_worker, "module_command", lambda *_: [sys.executable, "-c", program])
    worker = LocalWorker("id", "name", [], database_url=f"sqlite:///{tmp_path}/bexp.db")
    while "ready" not in worker.log.read_text():
        pass
    worker.stop(keeps_log=False)
    assert worker._process.returncode == status
    assert not worker.log.exists()


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("print('oh'); raise SystemExit(7)", "ended with status 7; .* ends with\noh"),
        ("for number in range(20): print(number)\nraise SystemExit(1)", r"ends with\n12\n13\n14\n15\n16\n17\n18\n19$"),
        ("raise ValueError('oh')", r"ended with status 1; .* ends with\nValueError: oh$"),
        ("print('one', flush=True); raise ValueError('oh')", r" ends with\nValueError: oh$"),
        (f"print('one\\n{RECORD}no such device'); raise SystemExit(2)", "^the worker ended: no such device$"),
        ("print('bexp worker: no such device'); raise SystemExit(3)", "^the worker ended: no such device$"),
        (f"print('{RECORD}oh'); raise SystemExit(4)", f"ended with status 4; .* ends with\n{RECORD}oh$"),
        ("import os; os.kill(os.getpid(), 9)", r"was ended by SIGKILL; .* ends with\n\(nothing\)"),
    ],
)
def test_a_worker_that_has_failed_is_told_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, said: str
) -> None:
    monkeypatch.setattr(local_worker, "module_command", lambda *_: [sys.executable, "-c", program])
    worker = LocalWorker("id", "name", [], database_url=f"sqlite:///{tmp_path}/bexp.db")
    worker._process.wait()
    with pytest.raises(WorkerEndedError, match=said):
        worker.check()
    worker.stop(keeps_log=False)


def test_a_worker_that_cannot_be_started_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(local_worker, "module_command", lambda *_: [str(tmp_path / "no program")])
    with pytest.raises(FileNotFoundError):
        LocalWorker("id", "name", [], database_url=f"sqlite:///{tmp_path}/bexp.db")
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_is_done_has_not_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_worker, "module_command", lambda *_: [sys.executable, "-c", "print('done')"])
    worker = LocalWorker("id", "name", [], database_url=f"sqlite:///{tmp_path}/bexp.db")
    worker._process.wait()
    assert not worker.check()
    worker.stop(keeps_log=True)
    assert worker.log.read_text() == "done\n"
    shutil.rmtree(worker.log.parent)  # as what cleans temporary folders does
    worker.stop(keeps_log=False)
