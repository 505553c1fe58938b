"""A small exploration on a simulated device, and how to read its steps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from bexp.explorer.model.parts import ExploredModel
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.event import EventCode, Progress
from bexp.explorer.records.recommendation import Answer, Recommendation
from bexp.explorer.records.trial import Measure, Trial
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.explore import explore
from bexp.explorer.search.legal_space import PrunedSpace, prune_space
from tests.explorer.shapes import experts, shapes
from tests.explorer.simulator import SimulatedDevice, report

MOE = experts(32, 4, 512)
MODEL = shapes(8, 1024, heads=16, vocab=32000, length=2048, name="moe", num_query_groups=4, moe=MOE)


def request(**changes: Any) -> ExplorationRequest:
    """A space of some hundred candidates, so that a run takes well under a second."""
    small = {"micro_batch_size": {"explore": {"min": 1, "max": 16}}, "attention_backends": ["cudnn", "flash"]}
    return ExplorationRequest.model_validate({"model": MODEL, "batch_size": 512, **small, **changes})


class _SpaceKey:
    """What a space is pruned from, equal where all of it is."""

    def __init__(self, *asked: Any) -> None:
        self.asked = asked
        self._text = tuple(each.model_dump_json() for each in asked)

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SpaceKey) and self._text == other._text


@cache
def _pruned(key: _SpaceKey) -> PrunedSpace:
    return prune_space(*key.asked)


def pruned(model: ExploredModel, req: ExplorationRequest, rep: DeviceReport) -> PrunedSpace:
    """`prune_space`, computed once for all tests that ask for the same: it takes a third of a small exploration."""
    return _pruned(_SpaceKey(model, req, rep))


def run(
    req: ExplorationRequest,
    device: Measure,
    *,
    rep: DeviceReport | None = None,
    history: Sequence[Trial] = (),
    stop_after: int | None = None,
) -> list[Progress]:
    steps = []
    for step in explore(req, rep or report(memory_gib=40), device, history=history, prune=pruned):
        steps.append(step)
        if stop_after is not None and len(steps) >= stop_after:
            break
    return steps


@cache
def explored() -> tuple[SimulatedDevice, tuple[Progress, ...]]:
    """`request()` explored on a device that measures it alone, for tests that only read what happened."""
    device = SimulatedDevice(request())
    return device, tuple(run(request(), device))


def answer_of(steps: Sequence[Progress]) -> Answer:
    answer = steps[-1].answer
    assert answer is not None
    return answer


def best_of(steps: Sequence[Progress]) -> Recommendation:
    """Return what is recommended in the end, where something is."""
    found = answer_of(steps).recommendation
    assert found is not None
    return found


def trials_of(steps: Sequence[Progress]) -> list[Trial]:
    return [step.trial for step in steps if step.trial is not None]


def lines(steps: Sequence[Progress], code: EventCode) -> list[str]:
    """The messages without the wall-clock seconds of trials, which no two runs share."""
    found = [event.message for step in steps for event in step.events if event.code is code]
    return [re.sub(r" in \d+\.\d s\)", ")", message) for message in found]
