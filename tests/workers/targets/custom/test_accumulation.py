"""Training commands whose gradients are compared as they are: the verdict, and what cannot be compared."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bexp.workers.targets.custom.accumulation import AGREES, DIFFERS, FAILED, USAGE, main
from tests.forked_trainings import SCRIPTS, TORCHRUN

LOSSES = str(SCRIPTS / "with_losses.py")

pytestmark = [pytest.mark.slow(together="trainings"), pytest.mark.usefixtures("forked_trainings")]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def run(*arguments: str, asked: tuple[str, ...] = ()) -> int:
    return main(["--device", "cpu", *asked, "--", sys.executable, *arguments])


def test_a_trainer_agrees_and_writes_nothing(tmp_path: Path, capfd: Any) -> None:
    assert run(str(SCRIPTS / "with_trainer.py"), "--output_dir", "out", asked=("--json",)) == AGREES
    found = json.loads(capfd.readouterr().out)
    assert found["agrees"]
    assert (found["batch_size"], found["micro_batch_size"]) == (8, 2)
    assert list(tmp_path.iterdir()) == []


def test_a_child_that_averages_by_micro_batch_is_told_in_a_few_lines(tmp_path: Path, capfd: Any) -> None:
    asked = ("--batch-size", "12", "--micro-batch-size", "3")
    fields = ("--per_device_train_batch_size", "{micro_batch_size}", "--gradient_accumulation_steps", "7")
    assert run(LOSSES, "--loss", "divided", "--output_dir", "out", *fields, asked=asked) == DIFFERS
    said = capfd.readouterr().out
    assert "1 micro-batch of 12" in said
    assert "4 micro-batches of 3" in said
    assert "averaged in each micro-batch" in " ".join(said.split())
    assert said.count("norm ") == 2
    assert list(tmp_path.iterdir()) == []


def test_several_processes_are_checked_together(capfd: Any) -> None:
    assert run(*TORCHRUN, LOSSES, "--output_dir", "out", "--by_device") == DIFFERS
    assert "counted on each device" in " ".join(capfd.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        ((str(SCRIPTS / "with_a_loop.py"), "--output", "out"), USAGE, "bexp.check_accumulation"),
        (("-c", "print('nothing to do')"), USAGE, "the command does not train"),
        (("-c", "raise SystemExit('no data set')"), FAILED, "no data set"),
        (("train.py", "{micro_batch_size}"), USAGE, "--micro-batch-size has to say"),
    ],
    ids=["loop", "nothing", "crash", "no size"],
)
def test_what_cannot_be_compared_is_told_on_stderr(
    arguments: tuple[str, ...], status: int, says: str, capfd: Any
) -> None:
    assert run(*arguments) == status
    found = capfd.readouterr()
    assert says in found.err
    assert found.out == ""
