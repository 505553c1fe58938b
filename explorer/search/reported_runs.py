"""Reports of real runs: which of them count for a search, and what they say."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.records.event import EventCode, EventDraft
from bexp.explorer.records.recommendation import CandidateFigures, Recommendation, Role
from bexp.explorer.records.run_report import ReportedRun, RunReport
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.component_subjects import OF_THE_SEARCH

FURTHEST_OFF = 1.25
"""A run that is faster or slower than composed by more than this factor was not limited by what is composed.

Waiting for data or for another program is the usual cause. Such a run says nothing about the composition.
"""
SAME_IF_NAMED_OTHERWISE = {
    "model": {"name"},
    "hf_config": {"_name_or_path", "transformers_version", "torch_dtype", "dtype"},
}
"""Keys of fields of a request that change nothing of what is trained."""


def is_same_training(one: ExplorationRequest, other: ExplorationRequest) -> bool:
    """Return whether two requests are about the same model, trained in the same way.

    What they explore, how large their batch is and how long they may take can differ.
    """
    return _compared(one) == _compared(other)


def summarize_reports(
    exploration_id: str, best: Recommendation, hardware: HardwareSpec, reports: Sequence[RunReport]
) -> tuple[ReportedRun, ...]:
    """Return the errors of composition that real runs show, for the candidates that `best` names.

    Trainers use the candidate that divides the batch where there is one, so its runs count as well as those of the
    recommended candidate. A candidate whose components were not all measured was not composed, and is left out.

    A run counts if it used the candidate's micro-batch size and, as far as is known, its settings. Its device must have
    the same name, and the same version of torch. Its speed must be within `FURTHEST_OFF` of the composed one.
    """
    known: list[CandidateFigures] = [best]
    other = best.alternative(Role.DIVIDING)
    if (
        other is not None
        and not other.predicted
        and other.candidate.micro_batch_size != best.candidate.micro_batch_size  # else nothing tells their runs apart
    ):
        known.append(other)
    summaries = (_summarize(exploration_id, each, hardware, reports) for each in known)
    return tuple(run for run in summaries if run is not None)


def _summarize(
    exploration_id: str, known: CandidateFigures, hardware: HardwareSpec, reports: Sequence[RunReport]
) -> ReportedRun | None:
    composed, peak_bytes = known.composed_tokens_per_second, known.measured_peak_bytes
    comparable = [
        report
        for report in reports
        if report.micro_batch_size == known.candidate.micro_batch_size
        and report.applied is not False
        and report.hardware == hardware.device_name
        and report.versions.get("torch", hardware.versions.torch) == hardware.versions.torch
        and 1 / FURTHEST_OFF <= report.tokens_per_second / composed <= FURTHEST_OFF
    ]
    if not comparable:
        return None
    peaks = [report.peak_bytes for report in comparable if report.peak_bytes]
    return ReportedRun(
        exploration_id=exploration_id,
        candidate=known.candidate,
        num_reports=len(comparable),
        speed_ratio=statistics.median(report.tokens_per_second for report in comparable) / composed,
        peak_ratio=max(peaks) / peak_bytes if peaks and peak_bytes else None,
    )


def peak_factor(reported: Sequence[ReportedRun]) -> float:
    """Return the factor by which real runs needed more memory than composed: at least 1, the median of candidates."""
    ratios = [run.peak_ratio for run in reported if run.peak_ratio is not None]
    return min(FURTHEST_OFF, max(1.0, statistics.median(ratios))) if ratios else 1.0


def describe_reported(reported: Sequence[ReportedRun]) -> str:
    """Return one sentence about what is used."""
    number = sum(run.num_reports for run in reported)
    speeds = " to ".join(f"{ratio:.2f}x" for ratio in sorted({min(_speeds(reported)), max(_speeds(reported))}))
    peaks = [run.peak_ratio for run in reported if run.peak_ratio is not None]
    memory = f" and up to {max(peaks):.2f}x the composed peak" if peaks else ""
    which = ", ".join(sorted({run.exploration_id for run in reported}))
    return (
        f"{number} report{'' if number == 1 else 's'} of real runs with this model and device (exploration {which}) "
        f"count: {speeds} the composed tokens/s{memory}"
    )


def reported_event(reported: Sequence[ReportedRun]) -> EventDraft:
    """Return the event that reports of real runs are used."""
    data = {"reported_runs": [run.model_dump(mode="json") for run in reported]}
    return EventDraft(code=EventCode.REAL_RUNS, message=describe_reported(reported), data=data)


def _speeds(reported: Sequence[ReportedRun]) -> list[float]:
    return [run.speed_ratio for run in reported]


def _compared(request: ExplorationRequest) -> dict[str, object]:
    document = request.model_dump(mode="json", exclude={*OF_THE_SEARCH})
    document["target"] = request.target_name
    document["execution"] = request.plain_execution
    for field, ignored in SAME_IF_NAMED_OTHERWISE.items():
        if isinstance(document[field], dict):
            document[field] = {key: value for key, value in document[field].items() if key not in ignored}
    return document
