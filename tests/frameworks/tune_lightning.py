"""Tunes a command that trains with Lightning, on the CPU, and holds the answer against the command at each size."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from bexp.workers.instruments.failures import TrialFailedError
from bexp.workers.targets.custom.command import CommandProcess
from bexp.workers.targets.custom.training_command import TrainingCommand
from tests.acceptance.conftest import Machine
from tests.tune_commands import with_lightning
from tests.tune_commands.with_a_loader import Texts

COMMAND = (sys.executable, "-W", "ignore", with_lightning.__file__, "--output", "out")
NAMED = ("--batch", "{micro_batch_size}", "--accumulate", "{grad_accum_steps}")
BATCH, SIZES = 16, (1, 2, 4, 8, 16)
SECONDS = 150.0
WRITTEN = {"checkpoints", "logs", "validated", "last.ckpt", "finished.json", "sizes.json"}


def plain_seconds(folder: Path, size: int) -> float:
    """The seconds of a sample in the command as it is, which writes all that a trial must not write."""
    sizes = ("--batch", str(size), "--accumulate", str(BATCH // size), "--max_steps", "8")
    subprocess.run([*COMMAND, *sizes], cwd=folder, check=True, capture_output=True, timeout=SECONDS)
    out = folder / "out"
    assert {path.name for path in out.iterdir()} == WRITTEN
    found = json.loads((out / "finished.json").read_text())["seconds"]
    out.rename(folder / f"plain-{size}")
    return float(found)


def measured(folder: Path, *given: str) -> dict[str, Any]:
    """What trials of two sizes say of the command, which has written nothing and is gone."""
    batch_size = BATCH if NAMED[0] in given else None
    command = CommandProcess(TrainingCommand((*COMMAND, *given), str(folder), {}, batch_size))
    try:
        command.ask("open", SECONDS, device="cpu", choice=None)
        found = command.ask("describe", SECONDS)
        found["seconds"] = [
            command.ask("measure", SECONDS, micro_batch_size=size)["micro_step_seconds"] for size in (4, 8)
        ]
        assert found["batch_size"] == BATCH
        return found
    finally:
        command.end()
        assert not (folder / "out").exists()
        lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
        assert not [line for line in lines if with_lightning.__file__ in line]


def run_with_answer(machine: Machine, *given: str) -> None:
    """Run the command with the answer: it trains and writes as it always does, and its steps keep the promise."""
    asked = ("--device", "cpu", "--micro-batch-size", "8,16", "--max-trials", "3", "--run")
    process = machine.start("tune", *asked, "--", *COMMAND, *given, "--max_steps", "14")
    assert process.wait(SECONDS) == 0, machine.err(process)
    sys.stdout.write(machine.err(process))
    found = re.findall(r"^bexp: \d+ optimizer .* tokens/s, (\S+) \+- ", machine.err(process), re.M)
    assert len(found) == 1
    assert 0.7 < float(found[0]) < 1.3, "validation and checkpoints are not counted"
    out = machine.folder / "out"
    assert json.loads((out / "sizes.json").read_text()) == [with_lightning.BEST] * 2 * 14, "the batch is 4 x 4"
    assert {path.name for path in out.iterdir()} == WRITTEN
    assert len(list((out / "checkpoints").iterdir())) == 14
    shutil.rmtree(out)


def refusal(folder: Path, *given: str) -> str:
    """What is said of a command whose size cannot be set."""
    try:
        measured(folder, *given)
    except TrialFailedError as error:
        return str(error)
    raise AssertionError(given)


def main() -> None:
    """Check all of it."""
    folder = Path(sys.argv[1])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    plain = {size: plain_seconds(folder, size) for size in SIZES}
    sys.stdout.write(f"seconds of a sample in the command as it is: {plain}\n")
    assert min(plain, key=lambda size: plain[size]) == with_lightning.BEST

    machine = Machine(folder)
    machine.environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
    asked = ("--device", "cpu", "--micro-batch-size", ",".join(map(str, SIZES)), "--max-trials", "6")
    sys.stdout.write(machine.run("tune", *asked, "--", *COMMAND))
    assert int(machine.run("best", "latest")) == with_lightning.BEST
    assert not (folder / "out").exists()

    for data in ("fit", "batch_sampler"):
        run_with_answer(machine, "--data", data)

    for package in ("lightning.pytorch", "pytorch_lightning"):
        for data in ("fit", "module", "datamodule", "batch_sampler"):
            found = measured(folder, "--package", package, "--data", data)
            assert found["micro_batch_size"] == 4
            assert found["seconds"][0] < found["seconds"][1] < 1.7 * found["seconds"][0], "its 8 ms are 16 ms, of 28"
            assert (found["samples"] is None) == (data == "batch_sampler")

    lengths = [len(Texts(200)[place]["input_ids"]) for place in range(200)]
    found = measured(folder, "--texts", "--processes", "2")
    assert found["samples"] == {"number": 200, "num_read": 200, "longest": max(lengths), "rows": 1, "tail": None}
    assert found["seq_length"] == round(sum(lengths) / 200)

    for given, why in ((("--data", "stream"), "has no batch_size"), (("--by_hand",), "by hand")):
        said = refusal(folder, *given)
        assert why in said, said
        assert said.endswith("put {micro_batch_size} where the command takes it"), said
        measured(folder, *given, *NAMED)


if __name__ == "__main__":
    main()
