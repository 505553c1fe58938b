"""A request whose devices exchange gradients, a candidate of it, and its exploration."""

from __future__ import annotations

from typing import Any

from bexp.explorer.cost.components import ComponentKind
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.records.recommendation import Recommendation
from bexp.explorer.records.trial import Trial, TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.explore import explore
from tests.explorer.explorations import pruned
from tests.explorer.shapes import shapes
from tests.explorer.simulator import SimulatedDevice, report

MODEL = shapes(4, 1024, 4096, heads=8, vocab=32000, length=1024)


def request(sharding: str = "none", **changes: Any) -> ExplorationRequest:
    fields = {
        "model": MODEL,
        "batch_size": 64,
        "num_devices": 4,
        "micro_batch_size": [1, 2, 4, 8],
        "training": {"sharding": sharding},
        "recompute": ["none"],
        "bta": {"enable": False},
        "attention_backends": ["flash"],
    }
    return ExplorationRequest.model_validate(fields | changes)


def candidate(micro_batch_size: int = 2) -> Candidate:
    return Candidate(micro_batch_size=micro_batch_size, attention_backend="flash", num_query_groups=8)


def run(
    req: ExplorationRequest, device: SimulatedDevice, num_devices: int = 4, history: tuple[Trial, ...] = ()
) -> tuple[Recommendation | None, str | None, list[Trial]]:
    rep = report(experts=False, num_devices=num_devices)
    device.hardware = rep.hardware
    steps = list(explore(req, rep, device, history=history, prune=pruned))
    assert steps[-1].answer is not None
    variant = steps[-1].answer.variants[0]
    return variant.recommendation, variant.reason, [step.trial for step in steps if step.trial is not None]


def communicates_in(task: TrialTask) -> bool:
    return any(component.kind is ComponentKind.COMMUNICATION for component in task.components)
