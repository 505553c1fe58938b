"""The answer of an exploration as text for a person."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bexp.explorer.answers.choices import batch_rows, saving_rows, second_figure, tiling_text
from bexp.explorer.answers.plan import base_text, expert_mode_rows, mesh_rows, other_mesh_rows, picture_rows
from bexp.explorer.answers.text import WIDTH, row, wrap
from bexp.explorer.answers.variants import variant_lines
from bexp.explorer.cost.step import MemoryParts
from bexp.explorer.dimensions.candidate import DIMENSIONS, Candidate
from bexp.explorer.model.amounts import bytes_text, rate_text, seconds_text
from bexp.explorer.model.target import BEXP
from bexp.explorer.model.training import LoRASpec
from bexp.explorer.records.recommendation import (
    Alternative,
    Answer,
    Recommendation,
    Relaxation,
    Role,
    TextFigures,
    VariantAnswer,
    WholeModelCheck,
)
from bexp.explorer.request.request import ExplorationRequest

TOTAL = "total"


def render_answer(
    answer: Answer,
    request: ExplorationRequest | None,
    measured: str | None = None,
    width: int = WIDTH,
    device: str | None = None,
) -> str:
    """Return the whole answer in lines of `width` columns, without a line break at its end.

    `measured` names the code that it is about, and `device` what it was measured on. Lines break between words; only a
    longer word is wider than `width`.
    """
    lines: list[str] = []
    main = answer.variants[0]
    if main.recommendation is None:
        lines += [nothing_text(main, device), *remedy_rows(main.remedies)]
    else:
        lines += _recommendation_rows(main.recommendation, request, measured, device)
    if len(answer.variants) > 1:
        lines += ["", *variant_lines(answer.variants)]
    if answer.timings:
        lines += ["", row("time spent", _time_spent(answer.timings))]
    return "\n".join(wrap(lines, width))


def render_recommendation(
    best: Recommendation,
    request: ExplorationRequest | None,
    measured: str | None = None,
    width: int = WIDTH,
    device: str | None = None,
) -> list[str]:
    """Return the lines of one recommendation."""
    return wrap(_recommendation_rows(best, request, measured, device), width)


def device_text(device: str | None) -> str:
    """Return where something was measured, for a first line."""
    return "" if device is None else f" on {device}"


def nothing_text(variant: VariantAnswer, device: str | None) -> str:
    """Return why nothing is recommended."""
    return f"No recommendation{device_text(device)}: {variant.reason or 'all of them failed'}"


def _recommendation_rows(
    best: Recommendation, request: ExplorationRequest | None, measured: str | None, device: str | None
) -> list[str]:
    size = best.candidate.micro_batch_size
    lines = [f"Recommended micro_batch_size: {size}{_context(request)}{device_text(device)}"]
    lines += [*second_figure(best, request), *_provisional(best, request), ""]
    if measured is not None:
        lines.append(row("measured", measured))
    if best.plan is not None:
        lines += [*mesh_rows(best.plan), *picture_rows(best.plan)]
    lines += _candidate_rows(best.candidate)
    if best.dropped_share is not None:
        lines.append(row("capacity factor", _dropped(best.candidate, best.dropped_share)))
    lines += [
        *_throughput_rows(best),
        row("base", best.base.describe() if best.plan is None else base_text(best.plan, best.base)),
        row("confidence", f"{best.confidence} out of 100{_within(request)}"),
        *_noise_rows(best),
        row("step", _step(best)),
        *batch_rows(best, request),
        row("peak memory", _peak(best)),
        row("with reserve", f"{bytes_text(best.required_bytes)} of {bytes_text(best.memory_limit_bytes)}{_kept(best)}"),
        *_memory_rows(best.memory),
        *saving_rows(best),
        *_text_rows(best),
    ]
    plain, largest = best.alternative(Role.LARGEST_WITHOUT_RECOMPUTE), best.alternative(Role.LARGEST_MICRO_BATCH)
    if plain is not None:
        lines.append(row("largest that fits", _alternative(best, plain)))
    if largest is not None and (plain is None or largest.candidate != plain.candidate):
        lines.append(row("largest that fits" if plain is None else "  if recomputed", _alternative(best, largest)))
    if (stock := best.alternative(Role.STOCK)) is not None:
        lines.append(row("stock best", _alternative(best, stock)))
    if (untiled := best.alternative(Role.UNTILED)) is not None:
        lines.append(row("without tiling", tiling_text(best, untiled)))
    if (undivided := best.alternative(Role.UNDIVIDED)) is not None:
        lines.append(row("whatever the batch", _alternative(best, undivided)))
    if (runner_up := best.alternative(Role.RUNNER_UP)) is not None:
        lines.append(row("runner-up", _runner_up(best, runner_up)))
    if best.plan is not None:
        lines += expert_mode_rows(best)
        lines += other_mesh_rows(best)
    return lines + [row("note", note.text) for note in best.notes]


def memory_parts(memory: MemoryParts) -> list[tuple[str, int]]:
    """Return the parts of the memory at the peak by name, without those of size 0."""
    return [(name.replace("_", " "), size) for name, size in memory.model_dump().items() if size]


def _time_spent(timings: Mapping[str, float]) -> str:
    """Return the activities that took more than a hundredth of the longest, and the total.

    A recording is replayed in less time than its activities once took: there is no total then.
    """
    parts = {name: seconds for name, seconds in timings.items() if name != TOTAL}
    least = max(parts.values(), default=0.0) / 100
    listed = ", ".join(f"{name.replace('_', ' ')} {seconds_text(s)}" for name, s in parts.items() if s > least)
    total = timings.get(TOTAL, 0.0)
    return f"{seconds_text(total)} in total: {listed}" if total > max(parts.values(), default=0.0) else listed


def _context(request: ExplorationRequest | None) -> str:
    if request is None:
        return ""
    seq_length = request.explored.seq_length
    length = f", {seq_length} tokens per sequence" if seq_length is not None else ""
    named = request.space.executions if request.space.names_executions else ()
    execution = f", {' or '.join(named)}" if named else ""
    target = "" if request.target_name == BEXP else f"target {request.target_name}, "
    texts = "" if request.batching_of_texts is None else f", {request.batching_of_texts} texts"
    kept = request.training.precision
    precision = {"pure": "", "master": ", master weights"}.get(kept, f", {kept}")
    name = request.training.optimizer.name
    optimizer = "" if name == "adamw" else f", optimizer {name}"
    lora = "" if request.training.lora is None else f", {_adapters(request.training.lora)}"
    quantized = "" if request.quantized is None else f", weights in {request.quantized.bits} bits"
    trainer = "" if request.trainer is None else f", for {request.runner.title}"
    what = f"{target}{request.mode}{execution}{length}{texts}{precision}{optimizer}{lora}{quantized}{trainer}"
    return f" for {request.explored.name} ({what})"


def _adapters(lora: LoRASpec) -> str:
    kind = f"{'rank-stabilised ' if lora.use_rslora else ''}{'DoRA' if lora.use_dora else 'LoRA'}"
    return f"{kind} of rank {lora.r}"


def _provisional(best: Recommendation, request: ExplorationRequest | None) -> Iterable[str]:
    if request is not None and is_provisional(best.confidence, request):
        yield (
            f"Provisional: confidence {best.confidence} is below {request.budget.confidence_target}, which was asked "
            "for. Another candidate may be better."
        )


def is_provisional(confidence: int, request: ExplorationRequest) -> bool:
    """Whether a search has ended below the confidence that its request asks for."""
    return confidence < request.budget.confidence_target


def _candidate_rows(candidate: Candidate) -> Iterable[str]:
    rows = (dimension.row(candidate) for dimension in DIMENSIONS)
    return (row(*texts) for texts in rows if texts is not None)


def _dropped(candidate: Candidate, share: float) -> str:
    return f"{candidate.capacity_factor:g}: experts drop {share:.1%} of the token-expert pairs under this routing"


def _within(request: ExplorationRequest | None) -> str:
    return f" that it is within {100 * request.tolerance:g}% of the best" if request is not None else ""


def _noise_rows(best: Recommendation) -> Iterable[str]:
    """Yield the confidence for other tolerances, and how much runs differ."""
    if best.run_noise is None:
        return
    stated = [f"{score} for {100 * float(within):g}%" for within, score in best.confidences.items()]
    yield row("  by tolerance", ", ".join(stated))
    yield row("  noise", f"two runs of a micro-step differ by {best.run_noise:.1%}")


def _throughput_rows(best: Recommendation) -> Iterable[str]:
    """Yield the tokens/s to expect: those of the whole model if it was run, whatever its blocks compose."""
    per_device, whole = f"{rate_text(best.expected_tokens_per_second)} per device", best.whole_model
    if best.candidate.is_whole:
        yield row("throughput", f"expect {per_device}, {best.ratio_text(best.performance)} base")
        yield row("  measured", "in whole steps of its own code")
    elif whole is None:
        yield row("throughput", f"expect about {per_device}, {best.ratio_text(best.performance)} base")
        yield row("  composed", "of measured blocks; no whole model has confirmed it")
    else:
        yield row("throughput", f"expect {per_device}, {best.ratio_text(best.performance)} base")
        yield row("  whole model", "ran at that speed, so this is the figure to expect")
        composed = rate_text(whole.tokens_per_second / (1 + whole.step_error))
        yield row("  composed", f"{composed} of measured blocks: {_composed_off(whole)}")


def _composed_off(check: WholeModelCheck) -> str:
    """Return how far the composed step and peak are from those of the whole model."""
    step, peak = _off(check.step_error, "shorter", "longer"), _off(check.peak_error, "lower", "higher")
    return f"a step that is {step}, and a peak that is {peak}"


def _off(error: float, less: str, more: str) -> str:
    """Return a relative error in words."""
    share = f"{abs(error):.1%}"
    return "equal" if share == "0.0%" else f"{share} {less if error < 0 else more}"


def _peak(best: Recommendation) -> str:
    """Return the peak to expect first, then the others."""
    measured = bytes_text(best.measured_peak_bytes)
    if best.candidate.is_whole:
        return measured
    composed = f"{measured} composed of measured blocks"
    predicted = f"{bytes_text(best.predicted_peak_bytes)} predicted by formulas"
    if best.whole_model is None:
        return f"{composed}, {predicted}"
    return f"{bytes_text(best.whole_model.measurement.peak_bytes)} in the whole model, {composed}, {predicted}"


def _kept(best: Recommendation) -> str:
    return f", which leaves {best.headroom:.0%} of the memory free as headroom" if best.headroom else ""


def _step(best: Recommendation) -> str:
    whole = best.whole_model
    step, micro, optimizer, communication = (
        (best.step_seconds, best.micro_step_seconds, best.optimizer_seconds, best.communication_seconds)
        if whole is None
        else (
            whole.step_seconds,
            whole.measurement.micro_step_seconds,
            whole.measurement.optimizer_seconds,
            whole.measurement.communication_seconds,
        )
    )
    parts = f"{seconds_text(micro)} per micro-batch"
    if best.optimizer_seconds == 0:  # there is no training
        return parts
    if optimizer > 0:  # some runs of whole models leave it out
        parts += f", optimizer {seconds_text(optimizer)}"
    if communication is not None:
        parts += f", communication {seconds_text(communication)}"
    return f"{seconds_text(step)} per step ({parts})"


def texts_text(texts: TextFigures) -> str:
    """Return what becomes of texts of unequal length, and whether an epoch of them fits; full rows are all alike."""
    how = (
        texts.batching if texts.budget_tokens is None else f"whole, up to {texts.budget_tokens:,} tokens a micro-batch"
    )
    if texts.rows_are_full:
        return f"{how}; every row is full"
    return (
        f"{how}; {texts.padding_share:.0%} of the computed tokens are padding, which tokens/s leave out; "
        f"a chance of {texts.out_of_memory_probability:.1%} that an epoch runs out of memory"
    )


def _text_rows(best: Recommendation) -> Iterable[str]:
    """Yield what texts of unequal length mean: padding, and the peaks of an epoch."""
    texts = best.texts
    if texts is None:
        return
    known = "" if texts.counted else ", by its distribution"
    cut = f"; {texts.num_cut:,} are longer than a sequence and cut" if texts.num_cut else ""
    yield row("texts", texts_text(texts))
    yield row("  epoch", f"{texts.num_texts:,} texts{known}{cut}")
    if texts.rows_are_full:
        return
    yield row(
        "  peaks",
        f"{bytes_text(texts.expected_peak_bytes)} of a micro-batch in the mean, at most "
        f"{bytes_text(texts.high_peak_bytes)} of 99.9% of them; the peak above is that of the longest",
    )


def _memory_rows(memory: MemoryParts) -> Iterable[str]:
    for name, size in memory_parts(memory):
        yield row(f"  {name}", f"{bytes_text(size):>10}")


def _alternative(best: Recommendation, other: Alternative) -> str:
    if other.candidate == best.candidate:
        return f"{best.ratio_text(other.ratio)}: it is the recommended one"
    predicted = ", predicted in part" if other.predicted else ""
    rate = rate_text(other.tokens_per_second)
    return f"{best.ratio_text(other.ratio)} over {other.candidate.describe()} ({rate}{predicted})"


def _runner_up(best: Recommendation, rival: Alternative) -> str:
    name, check = rival.candidate.describe(), rival.whole_model
    if rival.mesh is not None:  # which names the sharding
        name = f"{rival.mesh.describe()} {rival.candidate.model_copy(update={'sharding': None}).describe()}"
    if check is None:
        return f"{name}: {rival.outcome} as a whole model: {rival.reason or 'no reason given'}"
    reached = f"{rate_text(check.tokens_per_second)} as a whole model"
    return f"{name}: {reached}, and its blocks compose {_composed_off(check)}{_gain(best, rival)}"


def _gain(best: Recommendation, rival: Alternative) -> str:
    """Return how fast the recommended candidate is beside the runner-up; as fast, if only noise makes it slower."""
    if best.whole_model is None:
        return ""
    if rival.ratio >= 1.0:
        return f"; the recommended one is {best.ratio_text(rival.ratio, 3)} as fast"
    if best.prefer == "memory":
        return f"; the recommended one is {best.ratio_text(rival.ratio, 3)} as fast and needs less memory"
    return "; the recommended one is as fast, within the noise of such runs"


def remedy_rows(remedies: Iterable[Relaxation]) -> list[str]:
    """Return the lines about what would make something fit."""
    rows = [
        row(
            relaxation.kind.replace("_", " "),
            f"{relaxation.change}: peak {bytes_text(relaxation.predicted_peak_bytes)}, "
            f"{bytes_text(relaxation.required_bytes)} with reserve",
        )
        for relaxation in remedies
    ]
    title = "Any one of these changes is predicted to make it fit. The first one is preferred."
    return ["", title, *rows] if rows else []
