"""A space of a few candidates, and what its tests measure: each takes milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from bexp.explorer.cost.components import Component
from bexp.explorer.cost.step import MemoryParts
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import ComponentMeasurement, Measurement, Outcome, WholeModelMeasurement
from bexp.explorer.records.recommendation import Recommendation
from bexp.explorer.records.trial import Measure, Trial, TrialKind, executor_of
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.history import TrialHistory
from bexp.explorer.search.legal_space import PrunedSpace, prune_space
from bexp.explorer.search.loop import VariantContext
from bexp.explorer.search.posterior import Posterior
from tests.explorer.measurements import measured
from tests.explorer.shapes import shapes
from tests.explorer.simulator import SimulatedDevice, report

MODEL = shapes(2, 256, 512, heads=4, vocab=1000, length=512, name="dense")
REPORT = report(memory_gib=40, experts=False)


def small_request(**changes: Any) -> ExplorationRequest:
    """Three sizes, untiled, with no or full recomputation, on two attention back ends: twelve candidates."""
    small = {
        "micro_batch_size": [1, 2, 4],
        "batch_size": 512,
        "attention_backends": ["cudnn", "flash"],
        "recompute": ["none", "full"],
        "bta": {"enable": False},
    }
    return ExplorationRequest.model_validate({"model": MODEL, **small, **changes})


@cache
def _space(document: str) -> PrunedSpace:
    request = ExplorationRequest.model_validate_json(document)
    return prune_space(request.shapes, request, REPORT)


def small_space(request: ExplorationRequest) -> PrunedSpace:
    """The space of a request, enumerated once for all tests."""
    return _space(request.model_dump_json())


def small_state(**changes: Any) -> Posterior:
    """A state that knows nothing yet."""
    request = small_request(**changes)
    space = small_space(request)
    assert space.table is not None
    return Posterior(space.table, space.legal.candidates, request, REPORT.hardware)


def candidate(size: int = 1, **changes: Any) -> Candidate:
    """A candidate of the small space."""
    return Candidate.model_validate(
        {"micro_batch_size": size, "attention_backend": "cudnn", "num_query_groups": 4, **changes}
    )


def measure(
    state: Posterior, components: tuple[Component, ...], of: Candidate, *, noise: float = 0.0, scale: float = 1.0
) -> Measurement:
    """What the simulated device measures; `scale` multiplies its seconds."""
    device = SimulatedDevice(state.request, noise=noise)
    found: list[ComponentMeasurement] = []
    for component in components:
        seconds, host = device.seconds(component, state.table.model)
        saved, forward, backward = device.weigh(component, state.table.model)
        sizes = {"saved_bytes": saved, "forward_peak_bytes": forward, "backward_peak_bytes": backward}
        host_seconds, error = 0.01 * host, 0.001 * seconds
        found.append(
            measured(component, scale * seconds, host_seconds=host_seconds, standard_error_seconds=error, **sizes)
        )
    return Measurement(candidate=of, outcome=Outcome.OK, components=tuple(found))


def know(state: Posterior, *candidates: Candidate, scale: float = 1.0) -> None:
    """Measure candidates in full, a trial each, whose number is the candidate's row."""
    for each in candidates:
        row = state.table.row[each]
        state.knowledge.learn(row, measure(state, state.missing(row), each, scale=scale))


def contend(state: Posterior, samples: Any, **changes: Any) -> None:
    """Let the smallest sizes contend with samples of tokens/s, shape (N, A). All are clear and nothing is wanted."""
    tokens_NA = np.array(samples, float)
    number = tokens_NA.shape[1]
    none, every = np.zeros(number, np.bool_), np.ones(number, np.bool_)
    known = {"rows": np.array([state.table.row[candidate(size)] for size in (1, 2, 4)[:number]])}
    known |= {"mean_A": tokens_NA.mean(axis=0), "composed_NA": tokens_NA, "tokens_NA": tokens_NA, "clear_A": every}
    known |= {"wanted_AP": np.zeros((number, state.table.used_CP.shape[1]), np.bool_), "undecided_A": none}
    state._contenders = replace(state.contenders, **(known | {"runs_A": np.ones(number)} | changes))


def trial(
    number: int,
    of: Candidate | None = None,
    outcome: Outcome = Outcome.OK,
    *,
    kind: TrialKind = TrialKind.COMPONENTS,
    tokens: float | None = None,
    seconds: float = 1.0,
    **measured: Any,
) -> Trial:
    """A stored trial."""
    measurement = Measurement(candidate=of or candidate(), outcome=outcome, **measured)
    return Trial(number=number, kind=kind, measurement=measurement, tokens_per_second=tokens, seconds=seconds)


def whole(seconds: float = 0.01, **changes: Any) -> WholeModelMeasurement:
    """What a whole model took."""
    made = {
        "micro_step_seconds": seconds,
        "optimizer_seconds": 0.001,
        "standard_error_seconds": 0.001 * seconds,
        "peak_bytes": 2**30,
        "reserved_bytes": 2**30,
        "repeats": 3,
    }
    return WholeModelMeasurement.model_validate({**made, **changes})


def context(
    request: ExplorationRequest,
    trials: Sequence[Trial] = (),
    *,
    index: int = 0,
    measure: Measure | None = None,
    report: DeviceReport = REPORT,
) -> VariantContext:
    """One variant of a job whose clock stands still."""
    models = request.space.variants()
    history = TrialHistory(trials, request.budget, len(models))
    executor = executor_of(measure or SimulatedDevice(request, noise=0.0))
    return VariantContext(index, models[index], request, report, executor, history, lambda: 0.0)


def recommendation(of: Candidate | None = None, **changes: Any) -> Recommendation:
    """A recommendation with made-up figures."""
    made = {
        "candidate": of or candidate(4),
        "base": candidate(1),
        "tokens_per_second": 1234.5,
        "performance": 1.25,
        "confidence": 87,
        "step_seconds": 0.5,
        "micro_step_seconds": 0.1,
        "optimizer_seconds": 0.05,
        "composed_tokens_per_second": 1234.5,
        "grad_accum_steps": 4,
        "predicted_peak_bytes": 2**30,
        "measured_peak_bytes": 2**30,
        "required_bytes": 2**31,
        "memory_limit_bytes": 2**32,
        "memory": MemoryParts(parameters=2**30),
    }
    return Recommendation.model_validate({**made, **changes})
