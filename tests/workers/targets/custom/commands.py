"""Commands of a test: started in its folder, asked like a custom target's process, and ended with it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from bexp.explorer.records.measurement import ComponentFigures, WholeModelMeasurement
from bexp.workers.targets.custom.command import CommandProcess
from bexp.workers.targets.custom.training_command import TrainingCommand
from tests.waits import PATIENCE_SECONDS


class Commands:
    """Starts commands in a folder of their own, and ends them. A script after an option, `-u`, is no fork."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[CommandProcess] = []

    def __call__(self, *arguments: str, batch_size: int | None = None, **tries: list[Any]) -> CommandProcess:
        command = TrainingCommand((sys.executable, *arguments), str(self.folder), tries, batch_size)
        self.started.append(CommandProcess(command))
        return self.started[-1]


def open_(process: CommandProcess, **choice: Any) -> dict[str, Any]:
    return process.ask("open", PATIENCE_SECONDS, device="cpu", choice=choice or None)


def measure(process: CommandProcess, size: int, seconds: float = PATIENCE_SECONDS) -> WholeModelMeasurement:
    figures = process.ask("measure", seconds, micro_batch_size=size)
    own = ComponentFigures.model_fields.keys() - WholeModelMeasurement.model_fields.keys()
    return WholeModelMeasurement.model_validate({k: v for k, v in figures.items() if k not in own})
