"""The certainty of an answer: noise, confidence, what was not measured, and the worth of the next measurement."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bexp.client.explorations import Exploration
from bexp.explorer.answers.uses import is_provisional, surer_text
from bexp.explorer.records.recommendation import Recommendation
from bexp.explorer.request.request import ExplorationRequest


def describe_certainty(job: Exploration, num_reports: int) -> dict[str, Any] | None:
    """Return the certainty of a recommendation as a JSON object; None without a recommendation.

    `noise` is the relative standard deviation between two runs of a micro-step, null if it was not measured.
    `worth_at_most` of the next measurement is a share of the tokens/s.
    """
    best, request = job.recommendation, job.request
    if best is None:
        return None
    return {
        "noise": best.run_noise,
        "confidence": best.confidence,
        "confidence_by_tolerance": best.confidences,
        "tolerance": None if request is None else request.tolerance,
        "confidence_asked_for": None if request is None else request.budget.confidence_target,
        "not_measured": list(dict.fromkeys(_not_measured(best, request, num_reports))),
        "next_measurement": {
            "worth_at_most": best.expected_regret,
            "advice": _advice(job, best),
        },
    }


def _not_measured(best: Recommendation, request: ExplorationRequest | None, num_reports: int) -> Iterable[str]:
    if not best.is_measured_whole:
        yield "the recommended candidate as a whole model; its figures follow from measured parts"
    if best.run_noise is None:
        yield "the noise between runs"
    for other in best.alternatives:
        if other.predicted:
            yield f"all parts of {other.role.meaning}; its throughput is predicted in part"
    if request is not None and request.num_devices > 1 and best.communication_seconds is None:
        yield "communication between devices"
    if best.reused is not None:
        yield "what earlier explorations had measured on the same device; it was reused"
    if not num_reports:
        yield "a training run with this answer; none has been reported"
    yield "whether training converges as well"


def _advice(job: Exploration, best: Recommendation) -> str:
    if not job.is_final:
        return "wait: the exploration has not ended"
    if job.answer is None or job.request is None:
        return "resume the exploration, which has ended early, or explore again: what is measured is reused"
    if is_provisional(best.confidence, job.request):
        return surer_text(best, job.request, job.answer.serves_up_to, for_program=True)
    return "none: the confidence that was asked for is reached"
