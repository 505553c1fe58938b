"""`bexp check-accumulation` as a person runs it."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.acceptance.conftest import Machine
from tests.waits import PATIENCE_SECONDS

SCRIPT = Path(__file__).parents[1] / "tune_commands" / "with_losses.py"


def test_a_training_that_the_micro_batch_changes_is_told_so(machine: Machine) -> None:
    command = (sys.executable, SCRIPT, "--loss", "contrastive", "--output_dir", machine.folder / "out")
    process = machine.start("check-accumulation", "--device", "cpu", "--", *command)
    assert process.wait(PATIENCE_SECONDS) == 1
    assert machine.out(process).startswith("The gradients do not agree: another micro-batch changes this training.")
    assert "in-batch negatives" in machine.out(process)
    assert not (machine.folder / "out").exists()
