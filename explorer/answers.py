"""From a belief to the recommendation that a person reads."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from explorer.belief import Belief, Verdict
from explorer.candidates import Candidate
from explorer.composition import combine_seconds
from explorer.hardware import DeviceReport
from explorer.measurements import Outcome, WholeModelMeasurement
from explorer.recommendations import Alternative, Recommendation, RunnerUpCheck, WholeModelCheck
from explorer.requests import ExplorationRequest
from explorer.training import Sharding
from explorer.trials import Trial


@dataclass(frozen=True, slots=True)
class References:
    """What the recommended candidate is compared with, as rows of the table; null where there is no such thing."""

    base: int
    largest: int | None = None
    stock: int | None = None


def build_recommendation(
    belief: Belief,
    verdict: Verdict,
    references: References,
    report: DeviceReport,
    whole_model: Trial | None = None,
    runner_up: RunnerUpCheck | None = None,
) -> Recommendation:
    """Everything that is known of the recommended candidate."""
    request = belief.request
    table = belief.table
    candidate = table.candidates[verdict.row]
    seconds = belief.expected_seconds(verdict.row)
    base = belief.expected_seconds(references.base)
    found = belief.bytes(verdict.row)
    accumulation, nearest = accumulate(request, candidate.micro_batch_size)
    return Recommendation(
        candidate=candidate,
        base=table.candidates[references.base],
        tokens_per_second=seconds.tokens_per_second,
        performance=seconds.tokens_per_second / base.tokens_per_second,
        confidence=min(99, math.floor(100 * verdict.probability)),
        step_seconds=seconds.step,
        micro_step_seconds=seconds.micro_step,
        optimizer_seconds=seconds.optimizer,
        grad_accum_steps=accumulation,
        nearest_batch_sizes=nearest,
        predicted_peak_bytes=belief.predicted_bytes(verdict.row).peak,
        measured_peak_bytes=found.peak,
        required_bytes=found.required,
        memory_limit_bytes=belief.limit_bytes,
        memory=found.parts,
        largest_micro_batch=_alternative(belief, verdict.row, references.largest),
        stock=_alternative(belief, verdict.row, references.stock),
        whole_model=check_whole_model(belief, verdict.row, whole_model),
        runner_up=runner_up,
        notes=(
            *_notes(request, candidate, report, whole_model),
            *_predictions(belief, references),
            *_doubts(runner_up),
        ),
    )


def accumulate(request: ExplorationRequest, micro_batch_size: int) -> tuple[int | None, tuple[int, ...]]:
    """Accumulation steps for the requested batch, or the nearest batch sizes that divide."""
    if request.mode == "eval":
        return None, ()
    unit = micro_batch_size * request.num_devices
    if request.batch_size % unit == 0:
        return request.batch_size // unit, ()
    below, above = request.batch_size // unit * unit, -(-request.batch_size // unit) * unit
    return None, tuple(b for b in (below, above) if b > 0)


def check_whole_model(belief: Belief, row: int, trial: Trial | None) -> WholeModelCheck | None:
    """The composed step against the whole model's, where it was run."""
    if trial is None or trial.measurement.outcome is not Outcome.OK or trial.measurement.whole_model is None:
        return None
    whole = trial.measurement.whole_model
    candidate = belief.table.candidates[row]
    step = combine_seconds(
        whole.micro_step_seconds,
        whole.optimizer_seconds,
        candidate.micro_batch_size,
        belief.table.model,
        belief.request,
    )
    composed = belief.seconds(row)
    return WholeModelCheck(
        measurement=whole,
        tokens_per_second=step.tokens_per_second,
        step_seconds=step.step,
        step_error=(composed.step - step.step) / step.step,
        peak_error=(belief.bytes(row).peak - whole.peak_bytes) / whole.peak_bytes,
    )


def whole_model_tokens_per_second(belief: Belief, candidate: Candidate, whole: WholeModelMeasurement) -> float:
    """Tokens/s of a whole-model run."""
    return combine_seconds(
        whole.micro_step_seconds,
        whole.optimizer_seconds,
        candidate.micro_batch_size,
        belief.table.model,
        belief.request,
    ).tokens_per_second


def largest_untiled(belief: Belief, among: Collection[int]) -> int | None:
    """The row of the largest micro-batch that fits without batch tiling, at its fastest; it may not be measured yet."""
    rows = [i for i in among if belief.table.candidates[i].bta_tile is None and belief.fits(i)]
    if not rows:
        return None
    largest = max(int(belief.table.micro_batch_C[i]) for i in rows)
    return _fastest(belief, [i for i in rows if belief.table.micro_batch_C[i] == largest])


def best_stock(belief: Belief, report: DeviceReport, among: Collection[int]) -> int | None:
    """The row of the fastest candidate with stock back ends and no batch tiling."""
    rows = [
        i
        for i in among
        if belief.fits(i)
        and (c := belief.table.candidates[i]).bta_tile is None
        and report.is_stock(c.attention_backend, c.expert_backend)
    ]
    return _fastest(belief, rows)


def _fastest(belief: Belief, rows: list[int]) -> int | None:
    if not rows:
        return None
    mean = belief.mean_tokens_per_second()
    return rows[int(np.argmax(mean[rows]))]


def _alternative(belief: Belief, row: int, other: int | None) -> Alternative | None:
    if other is None:
        return None
    tokens_per_second = belief.expected_seconds(other).tokens_per_second
    return Alternative(
        candidate=belief.table.candidates[other],
        tokens_per_second=tokens_per_second,
        gain=belief.expected_seconds(row).tokens_per_second / tokens_per_second,
    )


def _predictions(belief: Belief, references: References) -> tuple[str, ...]:
    if references.largest is None or belief.is_known(references.largest):
        return ()
    return ("the throughput of the largest micro-batch is predicted in part from smaller ones",)


def _doubts(runner_up: RunnerUpCheck | None) -> tuple[str, ...]:
    if runner_up is None or runner_up.gain is None or runner_up.gain >= 1.0:
        return ()
    return ("as a whole model the runner-up was the faster one, by no more than the noise of single runs explains",)


def _notes(
    request: ExplorationRequest, candidate: Candidate, report: DeviceReport, whole_model: Trial | None
) -> tuple[str, ...]:
    notes = [f"execution: {request.execution}"]
    if request.num_devices > 1:
        notes.append("communication between devices is not included in the time")
    if request.training.sharding is not Sharding.NONE and request.mode == "train":
        notes.append(f"memory assumes {request.training.sharding} over {request.num_devices} devices")
    if whole_model is not None and whole_model.measurement.outcome is not Outcome.OK:
        ran = "not run" if whole_model.measurement.outcome is Outcome.UNSUPPORTED else whole_model.measurement.outcome
        notes.append(f"whole model: {ran}: {whole_model.measurement.reason}")
    elif whole_model is None:
        notes.append("whole model: not run with this candidate")
    if candidate.attention_backend == report.default_attention:
        notes.append(f"attention '{candidate.attention_backend}' is torch's own default here")
    return tuple(notes)
