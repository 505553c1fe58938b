"""`bexp tune` as a person runs it, with a command that trains."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.acceptance.conftest import Machine

SCRIPTS = Path(__file__).parents[1] / "tune_commands"
ASKED = ("--device", "cpu", "--micro-batch-size", "1,2,4,8", "--max-trials", "5", "--max-seconds", "60")


def test_a_trainer_is_tuned_its_batch_stays_and_nothing_is_written(machine: Machine) -> None:
    out = machine.folder / "out"
    command = (sys.executable, SCRIPTS / "with_trainer.py", "--output_dir", out, "--hub_token", "hf_secret")
    printed = machine.run("tune", *ASKED, "--", *command)
    found = re.search(
        r"for the command +--per_device_train_batch_size (\d)\s+--gradient_accumulation_steps (\d)", printed
    )
    assert found is not None, printed
    size, steps = map(int, found.groups())
    assert size * steps == 8, "the command's own batch is 2 x 4"
    assert "GPT2LMHeadModel" in printed
    assert re.search(r"base +micro_batch_size=2", printed), "1.00x is what the command says"
    assert re.search(rf"worst micro-batch +{size} x 128 tokens ran first: no micro-batch", printed), "it has 200 texts"
    assert not out.exists()
    stored = b"".join(path.read_bytes() for path in (machine.folder / "data").rglob("*") if path.is_file())
    assert b"with_trainer.py" in stored
    assert b"hf_secret" not in stored


def test_a_loop_of_ones_own_is_tuned_by_the_size_in_its_command(machine: Machine) -> None:
    out = machine.folder / "model"
    script = (sys.executable, SCRIPTS / "with_a_loop.py", "--output", out, "--fail-from", "8")
    fields = ("--batch", "{micro_batch_size}", "--accumulate", "{grad_accum_steps}")
    printed = machine.run("tune", *ASKED, "--batch-size", "8", "--", *script, *fields)
    found = re.search(r"for the command +\{micro_batch_size\} = (\d),\s+\{grad_accum_steps\} = (\d)", printed)
    assert found is not None, printed
    size, steps = map(int, found.groups())
    assert size * steps == 8
    assert size < 8, "8 runs out of memory"
    assert re.search(r"worst micro-batch +not known", printed)
    assert not out.exists()


def test_a_command_that_trains_nothing_is_told_so(machine: Machine) -> None:
    process = machine.start("tune", "--device", "cpu", "--", sys.executable, "-c", "print('hello')")
    assert process.wait(120) == 1
    said = machine.out(process) + machine.err(process)
    assert "the command is no training" in said
    assert "hello" in said
