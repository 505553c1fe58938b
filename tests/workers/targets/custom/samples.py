"""Targets as a person writes them, and what a profiler asks of them."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.hardware import HardwareSpec, SoftwareVersions
from bexp.explorer.model.model import DType
from bexp.explorer.model.target import LOCAL, OWN_ATTENTION
from bexp.explorer.records.measurement import ComponentMeasurement, Outcome
from bexp.explorer.request.request import Budget, ExplorationRequest
from bexp.targets.process import Served, answer
from bexp.workers.instruments.failures import TrialFailedError
from bexp.workers.instruments.phases import PhaseClock
from bexp.workers.targets.custom.target import CustomTarget, TargetSource

HARDWARE = HardwareSpec(
    device_kind="cpu",
    device_name="test",
    memory_bytes=1 << 34,
    memory_limit_bytes=1 << 31,
    matmul_flops_per_second={DType.FLOAT32: 1e11},
    memory_bandwidth_bytes_per_second=1e10,
    launch_seconds=1e-6,
    versions=SoftwareVersions(python="3", torch="2"),
)

PLAIN = """
    import torch
    from torch import nn

    class Target:
        def build(self, config, device):
            self.config = config
            return nn.Linear(64, 64, device=device)

        def batch(self, micro_batch_size, device):
            return torch.randn(micro_batch_size, 64, device=device)

        def step(self, model, batch):
            loss = model(batch).square().mean()
            loss.backward()
            return loss
"""


def write(folder: Path, source: str, name: str = "train.py") -> str:
    """Write a target and return the reference to it."""
    path = folder / name
    path.write_text(textwrap.dedent(source))
    return f"{path}:Target"


def open_custom(reference: str, *, seconds: float = 600.0, **fields: Any) -> CustomTarget:
    """The target, with a deadline for each trial."""
    request = ExplorationRequest.model_validate(
        {"target": LOCAL, "budget": Budget(trial_timeout_seconds=seconds), **fields}
    )
    return CustomTarget(TargetSource.of_file(LOCAL, reference), request, "cpu")


def candidate(micro_batch_size: int, settings: str | None = None) -> Candidate:
    return Candidate(
        micro_batch_size=micro_batch_size, attention_backend=OWN_ATTENTION, num_query_groups=1, settings=settings
    )


def measure(target: CustomTarget, micro_batch_size: int, settings: str | None = None) -> ComponentMeasurement:
    component = Component(kind=ComponentKind.SHELL, micro_batch_size=micro_batch_size, backend=settings)
    return target.measure_component(component, candidate(micro_batch_size, settings), PhaseClock())


class ProcessStandIn:
    """Takes the commands of a target's process and gives its replies, in the process of the test."""

    def __init__(self) -> None:
        self.alive = True
        self._served = Served()

    def ask(self, command: str, timeout_seconds: float, **arguments: Any) -> dict[str, Any]:
        """What `TargetProcess.ask` returns or raises."""
        reply = answer(getattr(self._served, command), json.loads(json.dumps(arguments)))
        found: dict[str, Any] = json.loads(json.dumps(reply))
        outcome = Outcome(found.pop("outcome"))
        if outcome is not Outcome.OK:
            self.end()
            raise TrialFailedError(outcome, found["reason"])
        return found

    def prepare(self, size: int, timeout_seconds: float) -> None:
        """Nothing: the model is built when the process is opened."""

    def end(self) -> None:
        """It answers no more."""
        self.alive = False
