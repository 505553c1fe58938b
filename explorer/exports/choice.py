"""The best candidate that a framework can be told, among all that an exploration has stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import geometric_mean

from bexp.explorer.cost_model.step import required_bytes
from bexp.explorer.exports.exploration import ExportError
from bexp.explorer.exports.framework import Framework, compute_dtype, find_missing
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import Outcome
from bexp.explorer.records.plan import MeshPlan
from bexp.explorer.records.recommendation import Alternative, Recommendation
from bexp.explorer.records.trial import Trial, TrialKind
from bexp.explorer.spec.candidate import Candidate
from bexp.explorer.spec.model import DType
from bexp.explorer.spec.request import ExplorationRequest


@dataclass(frozen=True, slots=True)
class Choice:
    """A candidate to export.

    `missing` names what the framework cannot be told of it. If that is context parallelism, `context_parallel_size` is
    1, and the accumulation steps keep the batch with that. `is_stored_best` says that it is the one that the answer
    itself names for the batch. `fits_full_logits` is false if full logits, where they replace a chunked loss, are not
    expected to fit beside it, and None if that is not known or does not matter. `plan` has the mesh to export.
    """

    candidate: Candidate
    context_parallel_size: int
    grad_accum_steps: int
    tokens_per_second: float
    missing: dict[str, str]
    is_stored_best: bool
    fits_full_logits: bool | None
    plan: MeshPlan | None = None


def _choose_plan(
    framework: Framework,
    request: ExplorationRequest,
    report: DeviceReport | None,
    recommendation: Recommendation,
    plan: MeshPlan,
) -> Choice:
    """Return the recommended candidate of a plan, or the best in plain mode, if the recommended one is in another.

    Raises ExportError if `framework` cannot be told its mesh.
    """
    candidate, rate, plain = recommendation.candidate, recommendation.tokens_per_second, plan.plain
    if plain is not None:  # no framework has another expert mode
        candidate, rate = plain.candidate, plain.tokens_per_second
        told = {name: getattr(plain, name) for name in ("mesh", "layers_per_stage", "num_micro_batches")}
        plan = plan.model_copy(update=told)
    mesh = plan.mesh
    if not mesh.is_data_parallel and not framework.schedules:
        raise ExportError(f"{framework.title} cannot be told a mesh ({mesh.describe()}); megatron and torchtitan can.")
    missing = find_missing(framework, candidate, request, report)
    if mesh.schedule is not None and mesh.schedule not in framework.schedules:
        missing["schedule"] = f"the pipeline schedule '{mesh.schedule}'"
    steps, is_best = plan.num_micro_batches, plain is None
    return Choice(candidate, 1, steps, rate, missing, is_stored_best=is_best, fits_full_logits=None, plan=plan)


@dataclass(frozen=True, slots=True)
class _Stored:
    candidate: Candidate
    tokens_per_second: float
    required_bytes: int | None


def choose(
    framework: Framework,
    request: ExplorationRequest,
    report: DeviceReport | None,
    recommendation: Recommendation,
    trials: Iterable[Trial],
) -> Choice:
    """Return the fastest stored candidate that divides the batch and that `framework` can be told whole.

    If there is none, it is the fastest among those of which the least is missing. Candidates whose full logits are not
    expected to fit come last. Raises ExportError if no stored candidate divides the batch, or if `framework` cannot be
    told what the model is.
    """
    factor = recommendation.candidate.capacity_factor
    if factor is not None and not framework.capacity:
        raise ExportError(
            f"{framework.title} cannot be told the capacity factor of the experts ({factor:g}), which is part of the "
            "model; megatron can."
        )
    if recommendation.plan is not None:
        return _choose_plan(framework, request, report, recommendation, recommendation.plan)
    best = recommendation.dividing or recommendation
    choices = []
    for stored in _stored(request, report, recommendation, trials):
        candidate = stored.candidate
        missing = find_missing(framework, candidate, request, report)
        size = 1 if "context_parallel" in missing else candidate.context_parallel_size
        steps, rest = divmod(request.batch_size, candidate.micro_batch_size * request.devices.data_parallel_size(size))
        if rest == 0 and steps > 0:
            fits = _fits_full_logits(stored, request, report, recommendation) if "loss" in missing else None
            named = candidate == best.candidate
            choices.append(Choice(candidate, size, steps, stored.tokens_per_second, missing, named, fits))
    if not choices:
        nearest = " or ".join(map(str, recommendation.dividing_batch_sizes or recommendation.nearest_batch_sizes))
        hint = f"; the nearest that can be is {nearest}" if nearest else ""
        raise ExportError(f"The batch_size {request.batch_size} is divided by no candidate that fits{hint}.")
    whole = [choice for choice in choices if choice.is_stored_best and not choice.missing]
    if whole:
        return whole[0]
    return min(choices, key=lambda one: (one.fits_full_logits is False, len(one.missing), -one.tokens_per_second))


def _stored(
    request: ExplorationRequest, report: DeviceReport | None, known: Recommendation, trials: Iterable[Trial]
) -> Iterator[_Stored]:
    """Yield the candidates that the answer names, then those of trials that fit, each once; all fit by definition.

    A trial's tokens/s are composed, and the answer's are those of whole models, so the error of the recommended
    candidate's composition corrects them. A candidate that was run whole counts with what all its runs reached.
    """
    named = [_Stored(known.candidate, known.expected_tokens_per_second, known.required_bytes)]
    if known.dividing is not None:
        other = known.dividing
        named.append(_Stored(other.candidate, other.tokens_per_second, other.required_bytes))
    rival = known.runner_up
    if rival is not None and rival.whole_model is not None and report is not None:
        needed = required_bytes(rival.whole_model.measurement.peak_bytes, report.hardware, request.allocator)
        if needed <= known.memory_limit_bytes:
            named.append(_Stored(rival.candidate, rival.whole_model.tokens_per_second, needed))
    alternatives: list[Alternative | None] = [known.stock, known.largest_micro_batch, known.largest_without_recompute]
    named += [_Stored(one.candidate, one.tokens_per_second, None) for one in alternatives if one is not None]
    named += [_Stored(one.candidate, one.tokens_per_second, one.required_bytes) for one in known.memory_choices]
    seen: set[Candidate] = set()
    for one in (*named, *_from_trials(request, report, known, trials)):
        if one.candidate not in seen:
            seen.add(one.candidate)
            yield one


def _from_trials(
    request: ExplorationRequest, report: DeviceReport | None, known: Recommendation, trials: Iterable[Trial]
) -> Iterator[_Stored]:
    if report is None:
        return
    failed = {trial.candidate for trial in trials if trial.measurement.outcome is not Outcome.OK}
    reached: dict[Candidate, list[float]] = {}
    for trial in trials:
        if trial.kind is TrialKind.WHOLE_MODEL and trial.tokens_per_second:
            reached.setdefault(trial.candidate, []).append(trial.tokens_per_second)
    correction = 1.0 if known.whole_model is None else 1.0 + known.whole_model.step_error
    for trial in trials:
        peak, rate = trial.measured_peak_bytes, trial.tokens_per_second
        if trial.candidate in failed or peak is None or rate is None:
            continue
        if trial.candidate.variant != known.candidate.variant:  # another variant of the model
            continue
        required = required_bytes(peak, report.hardware, request.allocator)
        if required <= known.memory_limit_bytes:
            runs = reached.get(trial.candidate)
            yield _Stored(trial.candidate, geometric_mean(runs) if runs else rate * correction, required)


def _fits_full_logits(
    stored: _Stored, request: ExplorationRequest, report: DeviceReport | None, known: Recommendation
) -> bool | None:
    """Return whether full logits fit beside what was measured: those, a float32 copy, and the copy's gradient."""
    size = request.explored.vocab_size
    if stored.required_bytes is None or size is None:
        return None
    dtype = compute_dtype(request, report)
    tokens = stored.candidate.micro_batch_size * request.seq_length / stored.candidate.context_parallel_size
    logits = tokens * size * (dtype.itemsize + 2 * DType.FLOAT32.itemsize)
    return stored.required_bytes + logits <= known.memory_limit_bytes
