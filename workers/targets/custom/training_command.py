"""A training command as a person has given it, and the environment in which a trial runs it."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from bexp.child_process import PACKAGES_FOLDER
from bexp.explorer.records.measurement import Outcome
from bexp.tune.environment import on_devices, with_hook
from bexp.tune.placeholders import describe_choice, fill, stands_in
from bexp.workers.devices.discovery import device_key
from bexp.workers.devices.lock import DeviceLocks, lock_folder
from bexp.workers.instruments.failures import TrialFailedError
from bexp.workers.process.environment import CHILD_DEFAULTS, CPU_DEFAULTS
from bexp.workers.process.kernel_cache import LIBRARY_FOLDERS
from bexp.workers.settings import LOCAL_TARGET

SUFFIX = ".json:command"
"""The end of a command's reference, which names the file that describes it."""
SIZE_FIELD = "{micro_batch_size}"
SILENT = {"WANDB_MODE": "disabled", "COMET_MODE": "DISABLED", "DISABLE_MLFLOW_INTEGRATION": "TRUE"}
"""Variables that keep trials from trackers."""


class OtherBatchError(TrialFailedError):
    """The refusal of a command that trains with another batch than the stated one."""

    def __init__(self, batch_size: int, size: int, steps: int) -> None:
        calls = "1 micro-batch" if steps == 1 else f"{steps} micro-batches"
        reason = f"the command has {calls} of {size} in an optimizer step: a batch of {size * steps}, not {batch_size}"
        super().__init__(Outcome.UNSUPPORTED, reason)
        self.batch_size = size * steps
        self.size = batch_size // steps if batch_size % steps == 0 else None
        """The micro-batch with which the command has the stated batch; None if there is none."""


@dataclass(frozen=True)
class TrainingCommand:
    """A training command, and the settings to try with it."""

    arguments: tuple[str, ...]
    folder: str
    """Where the command is run."""
    tries: Mapping[str, list[Any]]
    """The values of each setting that is tried in addition to the size."""
    batch_size: int | None = None
    """The batch that the person has stated."""
    own_folder: str | None = None
    """For the files of trials; removed when the person's own command ends. Default: a temporary folder."""
    devices: tuple[str, ...] = ()
    """Where the command runs, if the person has named devices."""
    counted: dict[str, dict[int, int]] = field(default_factory=dict)
    """Accumulation steps that trials have counted, by size, for each choice of other settings."""

    @classmethod
    def read(cls, path: Path) -> TrainingCommand:
        """Read the file that `bexp tune` has written."""
        found = json.loads(path.read_text())
        own = str(path.parent)
        given = (tuple(found["command"]), found["folder"], found["tries"], found["batch_size"])
        return cls(*given, own, tuple(found["devices"]))

    @property
    def has_size(self) -> bool:
        """Whether the size stands in the command."""
        return stands_in("micro_batch_size", self.arguments)

    def filled(self, choice: Mapping[str, Any], size: int | None) -> tuple[list[str], dict[str, Any]]:
        """Return the arguments of a trial, and the settings that do not stand in them."""
        values = dict(choice)
        if size is not None:
            values |= {"micro_batch_size": size, "grad_accum_steps": self.steps(size)}
        left = {name: value for name, value in choice.items() if not stands_in(name, self.arguments)}
        return fill(self.arguments, values), left

    def count(self, choice: Mapping[str, Any], size: int, steps: int) -> None:
        """Keep the accumulation steps that a trial has counted.

        Raises OtherBatchError if the command trains with another batch than the stated one.
        """
        self.counted.setdefault(describe_choice(choice), {})[size] = steps
        self._check_batch(size, steps)

    def expect(self, choice: Mapping[str, Any], size: int) -> None:
        """Raise OtherBatchError if the counted steps show that this size gives another batch:

        they are equal for all sizes.
        """
        steps = set((counted := self.counted.get(describe_choice(choice), {})).values())
        if len(counted) > 1 and len(steps) == 1:  # they do not follow the size
            self._check_batch(size, steps.pop())

    def _check_batch(self, size: int, steps: int) -> None:
        if self.has_size and self.batch_size not in (None, size * steps):
            raise OtherBatchError(self.batch_size or 0, size, steps)

    def steps(self, size: int) -> int:
        """Return the accumulation steps of a size, by the batch that the person has stated."""
        return max(1, (self.batch_size or size) // size)


def environment_of(devices: Sequence[str]) -> dict[str, str]:
    """Return the environment of the person who tunes, without the service's additions, and with the hook."""
    ours = itertools.chain(CHILD_DEFAULTS.items(), CPU_DEFAULTS.items())
    added = {name for name, value in ours if os.environ.get(name) == value} | LIBRARY_FOLDERS.keys()
    added |= {LOCAL_TARGET, "PYTHONSAFEPATH"}
    kept = {name: value for name, value in os.environ.items() if name not in added}
    path = [entry for entry in kept.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != str(PACKAGES_FOLDER)]
    kept |= SILENT | {"PYTHONPATH": os.pathsep.join(path)}
    return on_devices(with_hook(kept), devices)


@cache
def locks_of(devices: tuple[str, ...]) -> DeviceLocks:
    """Return the locks of a command's devices, which the profiler itself does not own.

    This process takes them once, and keeps them. Otherwise another process would take them between two starts of the
    command.
    """
    return DeviceLocks([device_key(device, os.environ) for device in devices], directory=lock_folder(os.environ))
