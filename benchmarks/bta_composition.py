"""The fastest candidates of a model under memory limits, composed of what was measured of its components."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from bexp.explorer.cost_model.candidate_table import SpaceTable
from bexp.explorer.cost_model.components import Component
from bexp.explorer.records.measurement import ComponentMeasurement, Measurement, Outcome
from bexp.explorer.records.trial import TrialPlan
from bexp.explorer.search.explore import explore
from bexp.explorer.search.search_state import SearchState
from bexp.explorer.spec.candidate import Candidate, Recompute
from bexp.explorer.spec.hardware import DeviceReport, HardwareSpec
from bexp.explorer.spec.request import ExplorationRequest

LIMITS_GIB = (40, 80, 132)
DEVICE_RATE = "device_tokens_per_second"


@dataclass(frozen=True, slots=True)
class Means:
    """The candidates that a column may choose from."""

    name: str
    allows: Callable[[Candidate], bool]


MEANS = (
    Means("plain", lambda c: c.bta_tile is None and c.recompute is Recompute.NONE),
    Means("tiled", lambda c: c.recompute is Recompute.NONE),
    Means("all", lambda _: True),
)


def best_candidates(
    request: ExplorationRequest,
    report: DeviceReport,
    table: SpaceTable,
    own: dict[Component, ComponentMeasurement],
) -> dict[str, dict[str, Any]]:
    """Return, for each limit and set of choices, the best measured candidate that fits, and the search's choice."""
    best: dict[str, dict[str, Any]] = {}
    for limit in LIMITS_GIB:
        limited = request.model_copy(update={"memory_limit_gib": float(limit)})
        for means in MEANS:
            allowed = [c for c in table.candidates if means.allows(c)]
            state = SearchState(SpaceTable(allowed, request.model, limited), allowed, limited, report.hardware)
            state.learn([Measurement(candidate=allowed[0], outcome=Outcome.OK, components=tuple(own.values()))])
            verdict = state.recommend()
            best[f"{limit}GiB/{means.name}"] = _describe(state, verdict.row) if verdict else {}
        best[f"{limit}GiB/explored"] = _explored(limited, report, own)
    return best


def add_device_rates(
    best: dict[str, dict[str, Any]],
    request: ExplorationRequest,
    hardware: HardwareSpec,
    own: Collection[ComponentMeasurement],
) -> None:
    """Write into each candidate of `best` its tokens per second on the device alone, beside those by the clock.

    The same components are composed with and without the host's seconds, and the ratio of the two is applied.
    """
    ratios: dict[Candidate, float] = {}
    for found in filter(None, best.values()):
        candidate = Candidate.model_validate(found["candidate"])
        if candidate not in ratios:
            alone = [measured.model_copy(update={"host_seconds": 0.0}) for measured in own]
            rates = [_composed_rate(candidate, request, hardware, measured) for measured in (own, alone)]
            ratios[candidate] = rates[1] / rates[0]
        found[DEVICE_RATE] = found["tokens_per_second"] * ratios[candidate]


def _composed_rate(
    candidate: Candidate, request: ExplorationRequest, hardware: HardwareSpec, own: Collection[ComponentMeasurement]
) -> float:
    state = SearchState(SpaceTable([candidate], request.model, request), [candidate], request, hardware)
    state.learn([Measurement(candidate=candidate, outcome=Outcome.OK, components=tuple(own))])
    return state.seconds(0).tokens_per_second


def relative_rates(
    best: dict[str, dict[str, Any]], dense: dict[str, dict[str, Any]], rate: str = "tokens_per_second"
) -> dict[str, float]:
    """Throughput relative to the dense model's under the same limit and with the same choices, where both have one."""
    return {
        key: found[rate] / dense[key][rate]
        for key, found in best.items()
        if rate in found and rate in dense.get(key, {})  # older results have no rates of the device alone
    }


def _explored(
    request: ExplorationRequest, report: DeviceReport, own: dict[Component, ComponentMeasurement]
) -> dict[str, Any]:
    """Return what the search recommends if these measurements are its device. Its space is the same."""

    def replay(plan: TrialPlan) -> Measurement:
        missing = [c for c in plan.components if c not in own]
        outcome = Outcome.UNSUPPORTED if missing else Outcome.OK
        return Measurement(
            candidate=plan.candidate,
            outcome=outcome,
            reason="not recorded" if missing else None,
            failed_component=missing[0] if missing else None,
            components=tuple(own[c] for c in plan.components if c in own),
        )

    answer, num_trials = None, 0
    for step in explore(request, report, replay):
        num_trials += step.trial is not None
        answer = step.answer or answer
    found = answer.recommendation if answer else None
    if found is None:
        return {}
    return {
        "candidate": found.candidate.model_dump(mode="json"),
        "tokens_per_second": found.tokens_per_second,
        "peak_bytes": found.measured_peak_bytes,
        "confidence": found.confidence,
        "num_trials": num_trials,
    }


def _describe(state: SearchState, row: int) -> dict[str, Any]:
    return {
        "candidate": state.table.candidates[row].model_dump(mode="json"),
        "tokens_per_second": state.seconds(row).tokens_per_second,
        "peak_bytes": state.bytes(row).peak,
    }
