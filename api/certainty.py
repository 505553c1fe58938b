"""How far an answer can be trusted: noise, confidence, what was not measured, and what measuring is worth."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bexp.client.explorations import Exploration, Result
from bexp.explorer.answers.answer import is_provisional
from bexp.explorer.answers.summary import surer_text
from bexp.explorer.records.recommendation import Recommendation, Role
from bexp.explorer.request.request import ExplorationRequest


def describe_certainty(job: Exploration, result: Result | None, num_reports: int) -> dict[str, Any] | None:
    """Return a JSON object that says how far a recommendation can be trusted; None if there is none.

    `noise` is the relative standard deviation between two runs of a micro-step, null if it was not measured.
    `worth_at_most` of the next measurement is a share of the tokens/s.
    """
    best, request = None if result is None else result.recommendation, job.request
    if result is None or best is None:
        return None
    return {
        "noise": best.run_noise,
        "confidence": best.confidence,
        "confidence_by_tolerance": best.confidences,
        "tolerance": None if request is None else request.tolerance,
        "confidence_asked_for": None if request is None else request.budget.confidence_target,
        "not_measured": list(_not_measured(best, request, num_reports)),
        "next_measurement": {
            "worth_at_most": best.expected_regret,
            "advice": _advice(job, result, best),
        },
    }


def _not_measured(best: Recommendation, request: ExplorationRequest | None, num_reports: int) -> Iterable[str]:
    if best.whole_model is None and not best.candidate.is_whole:
        yield "the recommended candidate as a whole model; its figures follow from measured parts"
    if best.run_noise is None:
        yield "the noise between runs"
    for name, other in (
        ("largest that fits", best.alternative(Role.LARGEST_MICRO_BATCH)),
        ("best with stock back ends", best.alternative(Role.STOCK)),
        ("best without tiling", best.alternative(Role.UNTILED)),
        ("best that divides the batch", best.alternative(Role.DIVIDING)),
    ):
        if other is not None and other.predicted:
            yield f"all parts of the {name}; its throughput is predicted in part"
    if request is not None and request.num_devices > 1 and best.communication_seconds is None:
        yield "communication between devices"
    if best.reused is not None:
        yield "what earlier explorations had measured on the same device; it was reused"
    if not num_reports:
        yield "a training run with this answer; none has been reported"
    yield "whether training converges as well"


def _advice(job: Exploration, result: Result, best: Recommendation) -> str:
    if not job.is_final:
        return "wait: the exploration has not ended"
    if result.answer is None or job.request is None:
        return "resume the exploration, which has ended early, or explore again: what is measured is reused"
    if is_provisional(best.confidence, job.request):
        return surer_text(best, job.request, result.answer.serves_up_to, for_program=True)
    return "none: the confidence that was asked for is reached"
