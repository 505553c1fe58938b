"""A space of a few candidates, and what its tests measure: each takes milliseconds."""

from __future__ import annotations

from functools import cache
from typing import Any

from explorer.cost_model.components import Component
from explorer.records.measurement import ComponentMeasurement, Measurement, Outcome
from explorer.records.trial import Trial, TrialKind
from explorer.search.pruned_space import PrunedSpace, prune_space
from explorer.search.search_state import SearchState
from explorer.spec.candidate import Candidate
from explorer.spec.request import ExplorationRequest
from tests.explorer.simulator import SimulatedDevice, report

MODEL: dict[str, Any] = {
    "name": "dense",
    "num_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "ffn_hidden_size": 512,
    "vocab_size": 1000,
    "seq_length": 512,
}
REPORT = report(memory_gib=40, experts=False)


def small_request(**changes: Any) -> ExplorationRequest:
    """Three sizes, untiled, with no or full recomputation, on two attention back ends: twelve candidates."""
    small = {
        "micro_batch_size": [1, 2, 4],
        "attention_backends": ["cudnn", "flash"],
        "recompute": ["none", "full"],
        "bta": {"enable": False},
    }
    return ExplorationRequest.model_validate({"model": MODEL, **small, **changes})


@cache
def _space(document: str) -> PrunedSpace:
    request = ExplorationRequest.model_validate_json(document)
    return prune_space(request.model, request, REPORT)


def small_space(request: ExplorationRequest) -> PrunedSpace:
    """The space of a request, enumerated once for all tests."""
    return _space(request.model_dump_json())


def small_state(**changes: Any) -> SearchState:
    """A state that knows nothing yet."""
    request = small_request(**changes)
    space = small_space(request)
    assert space.table is not None
    return SearchState(space.table, space.legal.candidates, request, REPORT.hardware)


def candidate(size: int = 1, **changes: Any) -> Candidate:
    """A candidate of the small space."""
    return Candidate.model_validate(
        {"micro_batch_size": size, "attention_backend": "cudnn", "num_query_groups": 4, **changes}
    )


def measure(
    state: SearchState, components: tuple[Component, ...], of: Candidate, *, noise: float = 0.0, scale: float = 1.0
) -> Measurement:
    """What the simulated device measures; `scale` multiplies its seconds."""
    device = SimulatedDevice(state.request, noise=noise)
    found: list[ComponentMeasurement] = []
    for component in components:
        seconds, host = device.seconds(component, state.table.model)
        saved, forward, backward = device.weigh(component, state.table.model)
        found.append(
            ComponentMeasurement(
                component=component,
                device_seconds=scale * seconds,
                host_seconds=0.01 * host,
                forward_device_seconds=scale * seconds / 3,
                standard_error_seconds=0.001 * seconds,
                repeats=10,
                saved_bytes=saved,
                forward_peak_bytes=forward,
                backward_peak_bytes=backward,
            )
        )
    return Measurement(candidate=of, outcome=Outcome.OK, components=tuple(found))


def know(state: SearchState, *candidates: Candidate, scale: float = 1.0) -> None:
    """Measure candidates in full, a trial each, whose number is the candidate's row."""
    for each in candidates:
        row = state.table.row[each]
        state.learn_trials([(row, measure(state, state.missing(row), each, scale=scale))])


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
