"""The command that runs tests under settings of other processors, with tests of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.processors import __main__ as command
from tests.processors.__main__ import Setting

TESTS = """
import os

import pytest


def test_environment():
    assert os.environ["OMP_NUM_THREADS"] == "1", "there are two"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize("name", ["OLD", "NEW"])
def test_setting(name):
    if name not in os.environ:
        pytest.skip("it is another setting")
"""


def test_each_setting_is_run_with_one_thread_and_with_two_and_a_file_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"old": Setting({"OLD": "1"}), "later": Setting({}, frozenset({"avx9"})), "new": Setting({"NEW": "1"})}
    monkeypatch.setattr(command, "SETTINGS", settings)
    file, output = tmp_path / "test_them.py", tmp_path / "found.json"
    file.write_text(TESTS)

    def found(*options: str) -> list[dict[str, Any]]:
        assert command.main([str(file), "--output", str(output), "--processes", "1", *options]) == 1
        runs: list[dict[str, Any]] = json.loads(output.read_text())["runs"]
        return runs

    first, second, *left_out = found("--settings", "old", "later")
    assert (first["setting"], first["threads"], second["threads"]) == ("old", 1, 2)
    assert (first["passed"], first["skipped"], first["failed"]) == (2, 1, [])
    assert (second["passed"], len(second["failed"])) == (1, 1)
    assert second["failed"][0].endswith("::test_environment")
    assert [run["left_out"] for run in left_out] == ["not on this processor: avx9"] * 2
    monkeypatch.setattr(command, "run", lambda *_: {"passed": 5, "failed": [], "seconds": 1.0})
    assert [run["setting"] for run in found()] == ["old", "old", "later", "later", "new", "new"]
    assert "new, 2 threads: 5 passed, 0 failed" in capsys.readouterr().out
    monkeypatch.setenv("BEXP_COMMIT", "another")
    with pytest.raises(SystemExit):
        found()
    assert "is of another commit" in capsys.readouterr().err


def test_a_run_that_breaks_off_counts_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "THREADS", (2,))
    file, output = tmp_path / "test_broken.py", tmp_path / "found.json"
    file.write_text("import os\nos._exit(5)\n")
    arguments = [str(file), "--output", str(output), "--settings", "its own", "--processes", "1"]
    assert command.main(arguments) == 1
    (run,) = json.loads(output.read_text())["runs"]
    assert run["failed"] == ["pytest ended with 5"]
