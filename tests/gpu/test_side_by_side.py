"""The command that runs the GPU tests, with tests that need no GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import __main__ as command
from tests.gpu.results import Plan
from tests.waits import PATIENCE_SECONDS

TESTS = """
import os
import signal
import time

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("number", range(4))
def test_number(number):
    assert os.environ["CUDA_VISIBLE_DEVICES"] in ("3", "5")
    assert number != 2 or os.path.exists({mended!r}), "two is wrong"
    if number == 3:
        pytest.skip("three is too many")


def test_that_is_cut_off():
    while not os.path.exists({mended!r}):
        with open({results!r}) as file:
            lines = file.readlines()
        begun = any("test_that_is_cut_off" in line for line in lines)  # written by another process, maybe later
        if begun and len([line for line in lines if "begun" not in line]) == 4:
            os.killpg(0, signal.SIGKILL)
        time.sleep(0.1)
"""


BROKEN = """
import os

if not os.path.exists({mended!r}):
    import a_module_that_is_missing
"""


class Runs:
    """The command on a file of tests, told how much time there is."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mended = folder / "mended"
        self.folder = folder / "tests"
        self.folder.mkdir()
        self.results = folder / "results.jsonl"
        (self.folder / "test_them.py").write_text(TESTS.format(mended=str(self.mended), results=str(self.results)))
        (self.folder / "test_broken.py").write_text(BROKEN.format(mended=str(self.mended)))
        monkeypatch.setattr(command, "GRACE_SECONDS", 0.0)
        monkeypatch.setattr(command, "_code", lambda: "code")
        monkeypatch.setattr(command, "_phases", lambda *_: [command.Phase("all", "gpu", 2, ["3", "5"])])

    def __call__(self, seconds: float, *options: str) -> int:
        named = ["--devices", "3,5", "--results", str(self.results)]
        return command.main([str(self.folder), *named, "--minutes", str(seconds / 60), *options])

    def outcomes(self) -> dict[str, str]:
        lines = [json.loads(line) for line in self.results.read_text().splitlines()]
        return {line["test"].partition("::")[2]: line["outcome"] for line in lines}

    def times(self, test: str) -> int:
        return sum(f"::{test}" in line and "begun" in line for line in self.results.read_text().splitlines())


def test_failures_are_printed_at_once_and_a_run_that_was_cut_off_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = Runs(tmp_path, monkeypatch)
    known = {"test_number[0]": "passed", "test_number[1]": "passed", "test_number[3]": "skipped"}
    known["test_number[2]"] = "failed"
    assert runs(PATIENCE_SECONDS) == 1
    printed, _, summary = capfd.readouterr().out.partition("results.jsonl: ")
    assert "NOT READ" in printed
    assert "No module named 'a_module_that_is_missing'" in printed
    assert "FAILED" in printed
    assert "two is wrong" in printed
    assert "2 passed, 1 skipped, 1 failed" in summary
    assert "begun, and cut off" in summary
    assert runs.outcomes() == known | {"test_that_is_cut_off": "begun"}
    runs.mended.touch()
    known["test_number[2]"] = "passed"
    assert runs(PATIENCE_SECONDS, "--failed") == 2
    assert runs.outcomes() == known | {"test_that_is_cut_off": "begun"}
    assert runs(PATIENCE_SECONDS) == 0
    assert runs.outcomes() == known | {"test_that_is_cut_off": "passed"}
    assert [runs.times(test) for test in ("test_number[1]", "test_number[2]", "test_that_is_cut_off")] == [1, 2, 2]


def test_it_ends_when_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = Runs(tmp_path, monkeypatch)
    assert runs(0.1) == 2
    assert "the time is over" in capfd.readouterr().out
    assert runs(0.0) == 2


def line(code: str, outcome: str, **more: Any) -> str:
    return json.dumps({"test": "test_a.py::test_it", "outcome": outcome, "code": code, **more})


def test_what_failed_runs_again_after_the_code_was_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = tmp_path / "results.jsonl", []

    def run(_phase: command.Phase, plan: Plan, _asked: object) -> tuple[list[str], bool]:
        asked.append(plan.only)
        return [], True

    monkeypatch.setattr(command, "_run", run)
    for lines in ([line("old", "failed"), line("old", "begun")], [line("old", "failed"), line("older", "passed")]):
        path.write_text("\n".join(lines))
        command.main(["--failed", "--devices", "3", "--results", str(path)])
    assert asked == [["test_a.py::test_it"]] * 2 + [[]] * 2
