"""The recommendation that a person reads, made from the posterior."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from bexp.explorer.cost.step import StepSeconds
from bexp.explorer.cost.token_dropping import dropped_share
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.parts import ExploredModel
from bexp.explorer.model.training import Sharding
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.recommendation import (
    CORES_ARE_SHARED,
    NOTHING_UNTILED,
    Alternative,
    DividingCandidate,
    Recommendation,
    RunnerUpCheck,
)
from bexp.explorer.records.trial import Trial
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.candidate_notes import candidate_notes
from bexp.explorer.search.choices import accumulate, dividing_batch_sizes, memory_choices
from bexp.explorer.search.confidence import confidence_score
from bexp.explorer.search.earlier_check import describe_reused
from bexp.explorer.search.event_messages import describe_noise
from bexp.explorer.search.noise_limit import NoiseFigures, composes_on_cpu, noise_figures
from bexp.explorer.search.posterior import BestCandidate, Posterior
from bexp.explorer.search.reported_runs import describe_reported
from bexp.explorer.search.runner_up import find_runner_up
from bexp.explorer.search.text_figures import new_width_note, text_figures
from bexp.explorer.search.whole_model_check import check_whole_model, expected_tokens_per_second, performance

ALIGNED_VOCABULARY, PADDED_VOCABULARY = 8, 64
"""A vocabulary that is a multiple of the first has weight rows of 16 bytes; the second is a common padding."""

LEAST_CHANCE = 0.01
"""The least probability of being faster with which a rival is named."""

SHARED_CORES = 0.1
"""Cores count as shared from this share of the time on in which threads waited for one."""


@dataclass(frozen=True, slots=True)
class References:
    """Rows of the candidates that the recommended one is compared with; None if there is no such candidate."""

    base: int
    largest: int | None = None
    largest_without_recompute: int | None = None
    stock: int | None = None
    untiled: int | None = None
    undivided: int | None = None


def build_recommendation(
    posterior: Posterior,
    best: BestCandidate,
    references: References,
    report: DeviceReport,
    whole_model: Trial | None = None,
    runner_up: RunnerUpCheck | None = None,
    dividing: DividingCandidate | None = None,
    *,
    final: bool = False,
    out_of_budget: bool = False,
    limited_by_noise: bool = False,
) -> Recommendation:
    """Return everything that is known about the recommended candidate.

    `dividing` is the best candidate that divides the batch. The `final` answer also says how memory can be saved,
    and why its confidence is below the target: if the search is `out_of_budget` or `limited_by_noise`, a note says so.
    """
    request = posterior.request
    table = posterior.table
    candidate = table.candidates[best.row]
    seconds = posterior.corrected_seconds(best.row)
    memory = posterior.bytes(best.row)
    accumulation, nearest = accumulate(request, candidate)
    noise = noise_figures(posterior, best.row)
    return Recommendation(
        candidate=candidate,
        base=table.candidates[references.base],
        tokens_per_second=seconds.tokens_per_second,
        performance=performance(posterior, best.row, references.base),
        confidence=confidence_score(best.confidence),
        step_seconds=seconds.step,
        micro_step_seconds=seconds.micro_step,
        optimizer_seconds=seconds.optimizer,
        communication_seconds=seconds.communication if table.communications else None,
        grad_accum_steps=accumulation,
        nearest_batch_sizes=nearest,
        predicted_peak_bytes=posterior.memory.predicted_bytes(best.row).peak,
        measured_peak_bytes=memory.peak,
        required_bytes=memory.required,
        memory_limit_bytes=posterior.limit_bytes,
        memory=memory.parts,
        largest_micro_batch=_alternative(posterior, best.row, references.largest),
        largest_without_recompute=_alternative(posterior, best.row, references.largest_without_recompute),
        stock=_alternative(posterior, best.row, references.stock),
        untiled=_alternative(posterior, best.row, references.untiled),
        undivided=_alternative(posterior, best.row, references.undivided),
        whole_model=check_whole_model(posterior, best.row, whole_model),
        runner_up=runner_up,
        notes=(
            *candidate_notes(request, candidate, report, whole_model),
            *_communication_notes(posterior, candidate, seconds),
            *_shared_cores(posterior),
            *_predictions(posterior, references),
            *_doubts(request, runner_up),
            *([describe_reported(posterior.knowledge.reported)] if posterior.knowledge.reported else []),
            *([] if posterior.knowledge.reused is None else [describe_reused(posterior.knowledge.reused)]),
            *_slow_head(posterior, best.row),
            *new_width_note(posterior, best.row),
            *(_nothing_untiled(request, references) if final else ()),
            *(_shortfall(posterior, best, noise if limited_by_noise else None, out_of_budget) if final else ()),
        ),
        dividing=dividing,
        texts=text_figures(posterior, best.row),
        dividing_batch_sizes=dividing_batch_sizes(posterior) if dividing is None else (),
        prefer=request.prefer,
        headroom=request.headroom,
        memory_choices=memory_choices(posterior, best.row) if final else (),
        composed_tokens_per_second=posterior.seconds(best.row).tokens_per_second,
        reused=posterior.knowledge.reused,
        dropped_share=_dropped_share(table.model, candidate, request),
        run_noise=noise.run_noise,
        confidences=noise.confidences,
        expected_regret=noise.expected_regret,
        weights=report.parts.weights if report.parts is not None else (),
    )


def _dropped_share(model: ExploredModel, candidate: Candidate, request: ExplorationRequest) -> float | None:
    if model.moe is None or model.moe.capacity_factor is None:
        return None
    tokens = candidate.micro_batch_size * model.seq_length // candidate.context_parallel_size
    return dropped_share(model.moe, request.routing, tokens, request.seed)


def largest_untiled(posterior: Posterior, among: Collection[int]) -> int | None:
    """Return the row of the fastest untiled candidate of the largest micro-batch that fits; None if none fits.

    The candidate may not be measured yet.
    """
    rows = [i for i in among if posterior.table.candidates[i].bta_tile is None and posterior.fits(i)]
    if not rows:
        return None
    largest = max(int(posterior.table.micro_batch_C[i]) for i in rows)
    return _fastest(posterior, [i for i in rows if posterior.table.micro_batch_C[i] == largest])


def largest_without_recompute(posterior: Posterior, among: Collection[int]) -> int | None:
    """Return `largest_untiled` among the candidates that recompute nothing."""
    return largest_untiled(posterior, [i for i in among if posterior.table.candidates[i].recompute is Recompute.NONE])


def best_stock(posterior: Posterior, report: DeviceReport, among: Collection[int]) -> int | None:
    """Return the row of the fastest candidate that fits with stock back ends and no batch tiling; None if none does."""
    rows = [
        i
        for i in among
        if posterior.fits(i)
        and (c := posterior.table.candidates[i]).bta_tile is None
        and report.is_stock(c.attention_backend, c.expert_backend)
    ]
    return _fastest(posterior, rows)


def best_untiled(posterior: Posterior) -> int | None:
    """Return the row of the fastest untiled candidate that fits, of a request that names tiles; None if none does.

    It may have to be measured, unless a measured one is expected to be within the tolerance of it.
    """
    if not posterior.request.bta.is_named:
        return None
    untiled = [i for i, c in enumerate(posterior.table.candidates) if c.bta_tile is None]
    rows = [i for i in untiled if posterior.is_open(i) and posterior.fits(i)]
    fastest, known = _fastest(posterior, rows), _fastest(posterior, [i for i in rows if posterior.is_known(i)])
    mean, tolerance = posterior.mean_tokens_per_second(), posterior.request.tolerance
    if fastest is None or known is None:
        return fastest
    return known if mean[known] >= (1.0 - tolerance) * mean[fastest] else fastest


def best_undivided(posterior: Posterior) -> int | None:
    """Return the row of the fastest candidate that fits and does not divide a stated batch with few divisors."""
    sizes = posterior.request.space.undivided_micro_batch_sizes
    if not sizes:
        return None
    among = [i for i, c in enumerate(posterior.table.candidates) if c.micro_batch_size in sizes]
    return _fastest(posterior, [i for i in among if posterior.is_open(i) and posterior.fits(i)])


def _fastest(posterior: Posterior, rows: list[int]) -> int | None:
    if not rows:
        return None
    mean = posterior.mean_tokens_per_second()
    return rows[int(np.argmax(mean[rows]))]


def _alternative(posterior: Posterior, row: int, other: int | None) -> Alternative | None:
    if other is None:
        return None
    own, tokens_per_second = (expected_tokens_per_second(posterior, each, row) for each in (row, other))
    return Alternative(
        candidate=posterior.table.candidates[other],
        tokens_per_second=tokens_per_second,
        gain=own / tokens_per_second,
        composed_tokens_per_second=posterior.seconds(other).tokens_per_second,
        predicted=not posterior.is_known(other),
    )


def _predictions(posterior: Posterior, references: References) -> tuple[str, ...]:
    if references.largest is None or posterior.is_known(references.largest):
        return ()
    return ("the throughput of the largest micro-batch is predicted in part from smaller ones",)


def _nothing_untiled(request: ExplorationRequest, references: References) -> tuple[str, ...]:
    if not request.bta.enable or references.untiled is not None:
        return ()
    return (NOTHING_UNTILED,)


def _doubts(request: ExplorationRequest, runner_up: RunnerUpCheck | None) -> tuple[str, ...]:
    if runner_up is None or runner_up.gain is None or runner_up.gain >= 1.0:
        return ()
    if request.prefer == "memory":  # a faster one was left for a smaller peak
        return ()
    return ("as a whole model the runner-up was the faster one, by no more than the noise of such runs explains",)


def _shared_cores(posterior: Posterior) -> tuple[str, ...]:
    """Return a note if other processes wanted the cores of a CPU while it was measured."""
    conditions = [run.conditions for runs in posterior.knowledge.log.runs.values() for run in runs.runs]
    shares = [c.core_wait_share for c in conditions if c is not None and c.core_wait_share is not None]
    if not shares or (waited := float(np.median(shares))) < SHARED_CORES:
        return ()
    return (
        f"{CORES_ARE_SHARED}: threads waited {waited:.0%} of the time for one. Seconds are those of the "
        "processor, without the waiting; a run beside others is slower, and least so with OMP_WAIT_POLICY=PASSIVE",
    )


def _shortfall(
    posterior: Posterior, best: BestCandidate, limit: NoiseFigures | None, out_of_budget: bool
) -> tuple[str, ...]:
    """Return a note that says why the confidence is below its target, if it is known; `limit` is the noise if it is."""
    request, target = posterior.request, posterior.request.budget.confidence_target
    if confidence_score(best.confidence) >= target:
        return ()
    if limit is not None:
        return (describe_noise(limit, target),)
    if out_of_budget:
        return (f"the budget was used up before the confidence reached {target}: raise max_seconds or max_trials",)
    if request.verify and composes_on_cpu(posterior):
        return (
            "on a CPU two runs of a whole model differ by several percent, so none was run to tell apart what is "
            "nearer: see the confidence for 5%",
        )
    rival = None if request.verify else find_runner_up(posterior)
    if rival is None or rival.row == best.row or rival.probability < LEAST_CHANCE:
        return ()
    return (
        f"measured components do not tell whether {posterior.table.candidates[rival.row].describe()} is faster "
        f"(a chance of {rival.probability:.0%}): whole models would, with verify: true",
    )


def _slow_head(posterior: Posterior, row: int) -> tuple[str, ...]:
    """Return a note if the vocabulary keeps a GPU from its fast kernels for matrix products, which need aligned rows.

    In benchmarks/results/tables the head takes 5 to 7 times its roofline seconds with 50257 words, and twice its
    roofline seconds if the vocabulary is a multiple of 8.
    """
    size = posterior.table.model.vocab_size
    if size is None or posterior.hardware.device_kind != "cuda" or size % ALIGNED_VOCABULARY == 0:
        return ()
    head = posterior.table.decompositions[row].head
    shares = posterior.table.step_shares(posterior.surrogate.device_mean_K, np.array([row]))[0]
    share = float(shares[posterior.table.columns_CP[row] == posterior.table.column[head]].sum())
    padded = -(-size // PADDED_VOCABULARY) * PADDED_VOCABULARY
    return (
        f"head and loss take {share:.0%} of a micro-step: vocab_size {size} is no multiple of {ALIGNED_VOCABULARY}, "
        f"which slows their products down; {padded} would not",
    )


def _communication_notes(posterior: Posterior, candidate: Candidate, seconds: StepSeconds) -> tuple[str, ...]:
    """Return a note that says whether communication, context parallelism apart, is included in the time."""
    request = posterior.request
    if request.num_devices == 1:
        return ()
    shared = candidate.context_parallel_size > 1
    if not posterior.table.communications:
        what = "other communication" if shared else "communication"
        return (f"{what} between devices is not included in the time",)
    sharding = request.sharded(candidate.sharding).training.sharding
    what = "gradients" if sharding is Sharding.NONE else "gradients and parameters"
    taken, share = 1e3 * seconds.communication, seconds.communication / seconds.step
    return (
        f"the exchange of {what} between {request.num_devices} devices is included in the time: beyond what "
        f"computation hides it takes {taken:.1f} ms of a step ({share:.1%})",
    )
