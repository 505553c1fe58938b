"""The fastest candidates of a model under memory limits, composed of what was measured of its components."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from explorer.cost_model.candidate_table import SpaceTable
from explorer.cost_model.components import Component
from explorer.records.measurement import ComponentMeasurement, Measurement, Outcome
from explorer.records.trial import TrialPlan
from explorer.search.explore import explore
from explorer.search.search_state import SearchState
from explorer.spec.candidate import Candidate, Recompute
from explorer.spec.hardware import DeviceReport
from explorer.spec.request import ExplorationRequest

LIMITS_GIB = (40, 80, 132)


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
