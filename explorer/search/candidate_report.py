"""The recommendation that a person reads, made from the posterior."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from bexp.explorer.cost.request_texts import text_batches, tokens_per_sequence
from bexp.explorer.cost.step import GIB, StepSeconds
from bexp.explorer.cost.text_batches import TextBatches
from bexp.explorer.dimensions.candidate import CHOICES, Candidate
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.hardware import BackendSupport
from bexp.explorer.model.optimizers import ON_HOST_NOTE, PAGED_NOTE
from bexp.explorer.model.parts import ExploredModel, ModelParts
from bexp.explorer.model.quantization import describe_weights
from bexp.explorer.model.routes import dropped_share
from bexp.explorer.model.target import BEXP, TRANSFORMERS, unlike_the_config
from bexp.explorer.model.training import Sharding
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import Outcome
from bexp.explorer.records.recommendation import (
    Alternative,
    Note,
    NoteCode,
    Recommendation,
    Role,
    TextFigures,
    WholeModelCheck,
)
from bexp.explorer.records.trial import Trial
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.alternatives import accumulate, check_whole_model, dividing_batch_sizes, performance
from bexp.explorer.search.compilation import describe_compilation
from bexp.explorer.search.confidence import confidence_score
from bexp.explorer.search.earlier_check import describe_reused
from bexp.explorer.search.event_messages import describe_noise
from bexp.explorer.search.host_pace import describe_host_pace
from bexp.explorer.search.noise_limit import NoiseFigures, composes_on_cpu, noise_figures
from bexp.explorer.search.posterior import BestCandidate, Posterior
from bexp.explorer.search.reported_runs import describe_reported
from bexp.explorer.search.whole_models import SHARE, find_runner_up

ALIGNED_VOCABULARY, PADDED_VOCABULARY = 8, 64
"""A vocabulary that is a multiple of the first has weight rows of 16 bytes; the second is a common padding."""

LEAST_CHANCE = 0.01
"""The least probability of being faster with which a rival is named."""

SHARED_CORES = 0.1
"""Cores count as shared from this share of the time on in which threads waited for one."""


def build_recommendation(
    posterior: Posterior,
    best: BestCandidate,
    base: int,
    report: DeviceReport,
    whole_model: Trial | None = None,
    alternatives: tuple[Alternative, ...] = (),
    *,
    final: bool = False,
    out_of_budget: bool = False,
    out_of_time: bool = False,
    limited_by_noise: bool = False,
) -> Recommendation:
    """Return all that is known about the recommended candidate. `base` is the row of the base.

    The notes of the `final` answer also say why its confidence is below the target: the search may be `out_of_budget`
    or `limited_by_noise`, or its whole models `out_of_time`.
    """
    request = posterior.request
    table = posterior.table
    candidate = table.candidates[best.row]
    seconds = posterior.corrected_seconds(best.row)
    memory = posterior.bytes(best.row)
    accumulation, nearest = accumulate(request, candidate)
    noise, whole = noise_figures(posterior, best.row), check_whole_model(posterior, best.row, whole_model)
    by_role = {each.role: each for each in alternatives}
    notes = _Notes(candidate_notes(request, candidate, report, whole_model))
    notes.add(NoteCode.COMMUNICATION, *_communication_notes(posterior, candidate, seconds))
    notes.add(NoteCode.HOST_PACE, *describe_host_pace(posterior, best.row))
    notes.add(NoteCode.COMPILATION, *describe_compilation(posterior, best.row))
    notes.add(NoteCode.SHARED_CORES, *_shared_cores(posterior))
    if (largest := by_role.get(Role.LARGEST_MICRO_BATCH)) is not None and largest.predicted:
        notes.add(
            NoteCode.PREDICTED, "the throughput of the largest micro-batch is predicted in part from smaller ones"
        )
    notes.add(NoteCode.RUNNER_UP, *_doubts(request, whole, by_role.get(Role.RUNNER_UP)))
    if reported := posterior.knowledge.reported:
        notes.add(NoteCode.REAL_RUNS, describe_reported(reported))
    if (reused := posterior.knowledge.reused) is not None:
        notes.add(NoteCode.REUSED, describe_reused(reused))
    notes.add(NoteCode.VOCABULARY, *_slow_head(posterior, best.row))
    notes.add(NoteCode.WIDTHS, *_new_widths(posterior, best.row))
    if final and request.bta.enable and Role.UNTILED not in by_role:
        text = "no candidate without tiling fits, so nothing shows what tiling gains or costs"
        notes.add(NoteCode.NOTHING_UNTILED, text)
    if final and confidence_score(best.confidence) < request.budget.confidence_target:
        limit = noise if limited_by_noise else None
        notes += _shortfall(posterior, best, limit, out_of_budget=out_of_budget, out_of_time=out_of_time)
    return Recommendation(
        candidate=candidate,
        base=table.candidates[base],
        rate_unit=table.model.rate_unit,
        tokens_per_second=seconds.tokens_per_second,
        performance=performance(posterior, best.row, base),
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
        whole_model=whole,
        alternatives=alternatives,
        notes=tuple(notes),
        texts=text_figures(posterior, best.row),
        dividing_batch_sizes=dividing_batch_sizes(posterior) if Role.DIVIDING not in by_role else (),
        prefer=request.prefer,
        headroom=request.headroom,
        composed_tokens_per_second=posterior.seconds(best.row).tokens_per_second,
        reused=reused,
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


def _doubts(request: ExplorationRequest, whole: WholeModelCheck | None, runner_up: Alternative | None) -> Iterator[str]:
    if whole is None or runner_up is None or runner_up.whole_model is None or runner_up.ratio >= 1.0:
        return
    if request.prefer == "speed":  # else a faster one was left for a smaller peak
        yield "as a whole model the runner-up was the faster one, by no more than the noise of such runs explains"


def _shared_cores(posterior: Posterior) -> Iterator[str]:
    """Yield that other processes wanted the cores of a CPU while it was measured, if they did."""
    conditions = [run.conditions for runs in posterior.knowledge.log.runs.values() for run in runs.runs]
    shares = [c.core_wait_share for c in conditions if c is not None and c.core_wait_share is not None]
    if shares and (waited := float(np.median(shares))) >= SHARED_CORES:
        yield (
            f"other processes share these cores: threads waited {waited:.0%} of the time for one. Seconds are those "
            "of the processor, without the waiting; a run next to others is slower, and least so with "
            "OMP_WAIT_POLICY=PASSIVE"
        )


def _shortfall(
    posterior: Posterior, best: BestCandidate, limit: NoiseFigures | None, *, out_of_budget: bool, out_of_time: bool
) -> tuple[Note, ...]:
    """Return why the confidence is below its target, if that is known; `limit` has the noise if that is why."""
    request, target = posterior.request, posterior.request.budget.confidence_target
    if limit is not None:
        return (Note(code=NoteCode.NOISE, text=describe_noise(limit, target)),)
    if out_of_budget:
        text = f"the budget was used up before the confidence reached {target}: raise max_seconds or max_trials"
        return (Note(code=NoteCode.BUDGET, text=text),)
    if out_of_time:
        text = (
            f"whole models have {SHARE:.0%} of max_seconds, and had used it up before the confidence reached {target}: "
            "raise max_seconds"
        )
        return (Note(code=NoteCode.BUDGET, text=text),)
    if request.verify and composes_on_cpu(posterior):
        text = (
            "on a CPU two runs of a whole model differ by several percent, so none was run to tell apart what is "
            "nearer: see the confidence for 5%"
        )
        return (Note(code=NoteCode.CONFIDENCE, text=text),)
    rival = None if request.verify else find_runner_up(posterior)
    if rival is None or rival.row == best.row or rival.probability < LEAST_CHANCE:
        return ()
    text = (
        f"measured components do not tell whether {posterior.table.candidates[rival.row].describe()} is faster "
        f"(a chance of {rival.probability:.0%}): whole models would, with verify: true"
    )
    return (Note(code=NoteCode.CONFIDENCE, text=text),)


def _slow_head(posterior: Posterior, row: int) -> Iterator[str]:
    """Yield that the vocabulary keeps a GPU from its fast kernels for matrix products, which need aligned rows.

    In benchmarks/results/tables the head takes 5 to 7 times its roofline seconds with 50257 words, and twice its
    roofline seconds if the vocabulary is a multiple of 8.
    """
    size = posterior.table.model.vocab_size
    if size is None or posterior.hardware.device_kind != "cuda" or size % ALIGNED_VOCABULARY == 0:
        return
    head = posterior.table.decompositions[row].head
    shares = posterior.table.step_shares(posterior.surrogate.device_mean_K, np.array([row]))[0]
    share = float(shares[posterior.table.columns_CP[row] == posterior.table.column[head]].sum())
    padded = -(-size // PADDED_VOCABULARY) * PADDED_VOCABULARY
    yield (
        f"head and loss take {share:.0%} of a micro-step: vocab_size {size} is no multiple of {ALIGNED_VOCABULARY}, "
        f"which slows their products down; {padded} would not"
    )


def _communication_notes(posterior: Posterior, candidate: Candidate, seconds: StepSeconds) -> Iterator[str]:
    """Yield whether communication, context parallelism apart, is included in the time."""
    request = posterior.request
    if request.num_devices == 1:
        return
    if not posterior.table.communications:
        what = "other communication" if candidate.context_parallel_size > 1 else "communication"
        yield f"{what} between devices is not included in the time"
        return
    sharding = request.sharded(candidate.sharding).training.sharding
    what = "gradients" if sharding is Sharding.NONE else "gradients and parameters"
    taken, share = 1e3 * seconds.communication, seconds.communication / seconds.step
    yield (
        f"the exchange of {what} between {request.num_devices} devices is included in the time: beyond what "
        f"computation hides it takes {taken:.1f} ms of a step ({share:.1%})"
    )


KEEPING_MEMORY = (
    "freed memory stayed with the measured process, as it does with MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_="
    f"{2**40}; a run with glibc's own settings can be slower"
)


def candidate_notes(
    request: ExplorationRequest, candidate: Candidate, report: DeviceReport, whole_model: Trial | None
) -> tuple[Note, ...]:
    """Return notes on a candidate and on how it was measured; `whole_model` is its run, if any."""
    notes = _Notes()
    if not candidate.is_whole:
        notes.add(NoteCode.EXECUTION, f"execution: {request.execution_of(candidate)}")
    if request.hf_config is not None and request.target_name == TRANSFORMERS:
        notes.add(NoteCode.CONFIG, *unlike_the_config(request.hf_config, request.quantization))
    if report.parts is not None and report.parts.weights:
        notes.add(NoteCode.WEIGHTS, f"weights: {describe_weights(report.parts.weights)}")
    if report.parts is not None and report.parts.gradients is not None:
        notes.add(NoteCode.GRADIENTS, report.parts.gradients.text)
    if report.parts is not None and (float8 := report.parts.float8) is not None:
        plain = "; experts stay in bfloat16" if report.parts.has_experts else ""
        notes.add(
            NoteCode.NUMBERS,
            f"float8 ({request.training.float8_recipe}): {float8.num_linear} linear layers of decoder layers{plain}. "
            f"At micro-batch 1 a layer's output is off by {float8.output_error:.1%} of its norm in bfloat16, and its "
            f"gradients by {float8.gradient_error:.1%}",
        )
    notes.add(NoteCode.LEFT_OUT, *_named_and_left_out(request, report))
    if request.trainer is not None and request.target_name not in request.runner.targets:
        measured = "bexp's reference layers" if report.parts is None else f"those of {report.parts.measured}"
        why = f"{request.runner.title} runs layers of its own; in their place, {measured} were measured"
        notes.add(NoteCode.MEASURED_LAYERS, why)
    if report.hardware.device_kind == "cpu" and not candidate.is_whole:
        notes.add(NoteCode.HOST_MEMORY, KEEPING_MEMORY)
    notes.add(NoteCode.HOST_MEMORY, *_host_notes(request, candidate, report.parts))
    if candidate.context_parallel_size > 1:
        passed = "the keys and values that context parallelism passes between devices are included in the time"
        notes.add(NoteCode.COMMUNICATION, passed)
    beyond = [size for size in request.devices.context_parallel_sizes if size > report.hardware.num_devices]
    if beyond:
        sizes = ", ".join(map(str, beyond))
        more = f"context-parallel sizes {sizes} need more devices than the {report.hardware.num_devices} here"
        notes.add(NoteCode.DEVICES, more)
    sharding = request.sharded(candidate.sharding).training.sharding
    if sharding is not Sharding.NONE and request.mode == "train":
        notes.add(NoteCode.SHARDING, f"memory assumes {sharding} over {request.num_devices} devices")
    if whole_model is not None and whole_model.measurement.outcome is not Outcome.OK:
        ran = "not run" if whole_model.measurement.outcome is Outcome.UNSUPPORTED else whole_model.measurement.outcome
        notes.add(NoteCode.WHOLE_MODEL, f"whole model: {ran}: {whole_model.measurement.reason}")
    elif whole_model is None:
        notes.add(NoteCode.WHOLE_MODEL, "whole model: not run with this candidate")
    if candidate.attention_backend == report.default_attention and not candidate.is_whole:
        owner = "torch" if request.target_name == BEXP else request.target_name
        own = f"attention '{candidate.attention_backend}' is the default of {owner} here"
        notes.add(NoteCode.DEFAULT_ATTENTION, own)
    return tuple(notes)


class _Notes(list[Note]):
    """Notes in the order in which they are added."""

    def add(self, code: NoteCode, *texts: str) -> None:
        """Add notes with a code."""
        self += [Note(code=code, text=text) for text in texts]


def _named_and_left_out(request: ExplorationRequest, report: DeviceReport) -> list[str]:
    """Return a note for each policy, execution and back end that is named among others and cannot be had here."""
    refused = {} if report.parts is None else report.parts.unavailable
    policies = [policy for policy in request.recompute or () if policy in refused]
    asked: tuple[tuple[str, tuple[str, ...] | None, tuple[BackendSupport, ...]], ...] = (
        *((choice.name, choice.named(request), report.choices.get(choice.name, ())) for choice in CHOICES),
        ("attention back end", request.attention_backends, report.attention_backends),
        ("expert back end", request.expert_backends, report.expert_backends),
    )
    return [f"recompute '{policy}' is left out: {refused[policy]}" for policy in policies] + [
        f"{what} '{each.name}' {'are' if what == 'kernels' else 'is'} left out: {each.reason}"
        for what, named, usable in asked
        for each in usable
        if not each.usable and each.name in (named or ())
    ]


def _host_notes(request: ExplorationRequest, candidate: Candidate, parts: ModelParts | None) -> Iterator[str]:
    """Yield what lies in the host's memory."""
    if parts is None:
        return
    if candidate.recompute is Recompute.OFFLOAD:
        tokens = candidate.micro_batch_size * parts.seq_length
        expected = tokens * sum(parts.kind(name).saved_bytes_per_token for name in parts.layers)
        yield f"activations: about {expected / GIB:.1f} GiB of the host's memory, pinned, from forward to backward"
    if parts.optimizer_host_bytes is not None:
        yield f"optimizer: {parts.optimizer_host_bytes / GIB:.1f} GiB of the host's memory, where it steps"
        yield ON_HOST_NOTE
    if (known := request.training.optimizer.of_library) is not None and known.is_paged:
        yield PAGED_NOTE


def text_figures(posterior: Posterior, row: int) -> TextFigures | None:
    """Return the figures of a candidate; None if every sequence is full."""
    request, table = posterior.request, posterior.table
    size = table.candidates[row].micro_batch_size
    batches, batching = text_batches(request, size), request.batching_of_texts
    if batches is None or batching is None or request.lengths is None:
        return None
    texts, tokens = request.lengths.cut(request.seq_length), tokens_per_sequence(table.model, request)
    expected, high = batches.peaks(_peaks(posterior, row, batches))
    whole = posterior.memory.whole_peak(row)
    factor = 1.0 if whole is None else whole / posterior.bytes(row).peak
    return TextFigures(
        batching=batching,
        num_texts=round(texts.num_texts),
        num_cut=round(texts.num_cut),
        counted=texts.is_counted,
        budget_tokens=size * request.seq_length if batching == "token_budget" else None,
        tokens_per_sequence=tokens,
        padding_share=max(0.0, 1.0 - size * tokens / batches.expected_positions),
        expected_peak_bytes=round(factor * expected),
        high_peak_bytes=round(factor * high),
        out_of_memory_probability=1.0 - posterior.memory.probability_fits(row),
    )


def _new_widths(posterior: Posterior, row: int) -> Iterator[str]:
    """Yield what the first micro-batches of each width take, if that is more than the tolerance."""
    each, share = _new_widths_of_command(posterior, row) if posterior.is_whole else _stated_new_widths(posterior, row)
    micro_step = posterior.seconds(row).micro_step
    if each * share > posterior.request.tolerance * micro_step:
        text = (
            f"the first micro-batch of each width takes {each:.2f} s longer, because attention plans its kernels for "
            f"it: {each * share / micro_step:.0%} of an epoch, and of a short run more. A collator with "
            "pad_to_multiple_of=64 makes few widths"
        )
        stated = ": to measure that, state lengths that are rounded up to it"
        yield text if posterior.is_whole else text + stated


def _stated_new_widths(posterior: Posterior, row: int) -> tuple[float, float]:
    """Return the seconds that a new width adds, and the share of micro-batches with one, with a request's lengths."""
    texts = posterior.surrogate.texts
    batches = text_batches(posterior.request, posterior.table.candidates[row].micro_batch_size)
    if texts is None or batches is None or not batches.new_width_share:
        return 0.0, 0.0
    return float(texts.new_width_C[row]) / batches.new_width_share, batches.new_width_share


def _new_widths_of_command(posterior: Posterior, row: int) -> tuple[float, float]:
    """Return the same as the trials of a training command saw it."""
    seen = [(run.new_width_seconds, run.new_width_share) for run in posterior.runs_of(row)]
    each, share = np.array([pair for pair in seen if None not in pair] or [(0.0, 0.0)], np.float64).mean(axis=0)
    return float(each), float(share)


def _peaks(posterior: Posterior, row: int, batches: TextBatches) -> list[int]:
    """Return the composed peak of each of the micro-batches that are measured of a size."""
    table, longest = posterior.table, batches.longest.positions
    own = table.columns_CP[row][table.used_CP[row]]
    static, peaks_of_size = int(table.static_bytes_C[row]), []
    for place, batch in enumerate(batches.measured):
        bytes_3K = posterior.surrogate.bytes_3K.copy()
        for column in own:
            component = table.components[column]
            if not component.micro_batch_size:
                continue
            observed = posterior.knowledge.log.runs.get(component)
            figures = None if observed is None else observed.runs[-1].batches
            if figures is None or len(figures) != len(batches.measured):
                bytes_3K[:, column] *= batch.positions / longest  # it was not measured at this length
                continue
            one = figures[place]
            bytes_3K[:, column] = one.saved_bytes, one.forward_peak_bytes, one.backward_peak_bytes
        saved_C, over_C = table.activation_bytes(*bytes_3K, share_of_longest=batch.positions / longest)
        peaks_of_size.append(static + round(float(saved_C[row] + over_C[row])))
    return peaks_of_size
