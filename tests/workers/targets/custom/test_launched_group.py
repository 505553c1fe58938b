"""A Trainer that `accelerate launch` starts in two processes, from its file. On a CPU accelerate shards nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from bexp.explorer.records.measurement import Outcome
from bexp.workers.instruments.failures import TrialFailedError
from bexp.workers.targets.custom.command import CommandProcess
from bexp.workers.targets.custom.training_command import TrainingCommand
from tests.explorer.formats.trainer_files import FSDP2_LAUNCH
from tests.forked_trainings import SCRIPTS
from tests.waits import PATIENCE_SECONDS

pytestmark = [pytest.mark.slow(together="trainings")]

SIZES = ("--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "4")


def test_each_process_has_the_size_of_the_trial_and_a_killed_rank_ends_the_group_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One start serves all sizes, as those of a person's file take long."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    configuration, seen = tmp_path / "fsdp.yaml", tmp_path / "seen"
    configuration.write_text(yaml.safe_dump({**FSDP2_LAUNCH, "num_processes": 2, "use_cpu": True}))
    seen.mkdir()
    launcher = ("-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", str(configuration))
    given = ("--output_dir", str(tmp_path / "out"), "--seen", str(seen), "--kill_from", "16")
    command = (sys.executable, *launcher, str(SCRIPTS / "with_a_launcher.py"), *given, *SIZES)
    training = CommandProcess(TrainingCommand(command, str(tmp_path), {}))
    try:
        training.ask("open", PATIENCE_SECONDS, device="cpu", choice=None)
        described = training.ask("describe", PATIENCE_SECONDS)
        figures = training.ask("measure", PATIENCE_SECONDS, micro_batch_size=8)
        sizes = [set((seen / str(rank)).read_text().split()) for rank in range(2)]
        with pytest.raises(TrialFailedError) as caught:
            training.ask("measure", PATIENCE_SECONDS, micro_batch_size=16)
    finally:
        training.end()
    assert (described["batch_size"], described["micro_batch_size"]) == (8, 2), "of each device, as observed"
    assert described["processes"]["number"] == 2
    assert figures["micro_step_seconds"] > 0
    assert sizes == [{"2", "8"}] * 2
    assert (caught.value.outcome, str(caught.value)) == (Outcome.CRASHED, "rank 1 was killed by SIGKILL")
