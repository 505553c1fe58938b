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


def start(folder: Path, *given: str) -> CommandProcess:
    configuration, seen = folder / "fsdp.yaml", folder / "seen"
    configuration.write_text(yaml.safe_dump({**FSDP2_LAUNCH, "num_processes": 2, "use_cpu": True}))
    seen.mkdir()
    launcher = ("-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", str(configuration))
    script = (str(SCRIPTS / "with_a_launcher.py"), "--output_dir", str(folder / "out"), "--seen", str(seen))
    training = CommandProcess(TrainingCommand((sys.executable, *launcher, *script, *SIZES, *given), str(folder), {}))
    training.ask("open", PATIENCE_SECONDS, device="cpu", choice=None)
    return training


def test_each_process_has_the_size_of_the_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    training = start(tmp_path)
    try:
        described = training.ask("describe", PATIENCE_SECONDS)
        figures = training.ask("measure", PATIENCE_SECONDS, micro_batch_size=8)
    finally:
        training.end()
    assert (described["batch_size"], described["micro_batch_size"]) == (8, 2), "of each device, as observed"
    assert described["processes"]["number"] == 2
    assert figures["micro_step_seconds"] > 0
    for rank in range(2):
        sizes = (tmp_path / "seen" / str(rank)).read_text().split()
        assert set(sizes) == {"2", "8"}, "one start serves both sizes"


def test_a_killed_rank_ends_the_group_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    training = start(tmp_path, "--kill_from", "8")
    try:
        training.ask("describe", PATIENCE_SECONDS)
        with pytest.raises(TrialFailedError) as caught:
            training.ask("measure", PATIENCE_SECONDS, micro_batch_size=8)
    finally:
        training.end()
    assert (caught.value.outcome, str(caught.value)) == (Outcome.CRASHED, "rank 1 was killed by SIGKILL")
