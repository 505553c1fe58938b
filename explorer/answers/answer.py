"""The rows of an answer: the settings to run, their gain, the measurements, and other candidates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bexp.explorer.answers.alternatives import alternative_rows, batch_rows, composed_off, describe_tiling, memory_rows
from bexp.explorer.answers.rows import AnswerText, Row, Table, detail, main, part
from bexp.explorer.answers.uses import is_provisional, next_rows, surer_text
from bexp.explorer.cost.step import MemoryParts
from bexp.explorer.dimensions.candidate import DIMENSIONS, Candidate
from bexp.explorer.model.amounts import bytes_text, rate_text, seconds_text
from bexp.explorer.model.parts import ModelParts
from bexp.explorer.model.target import BEXP, describe_target
from bexp.explorer.model.training import LoRASpec
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.recommendation import (
    Answer,
    NoteCode,
    Recommendation,
    Relaxation,
    RelaxationKind,
    Role,
    TextFigures,
    VariantAnswer,
)
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.trainers.registry import FILES

TOTAL, QUEUE = "total", "queue"
LEAST_GAIN = 1.01
"""The least gain over the best candidate with stock kernels that is stated."""
SPEED_NOTES = {NoteCode.COMPILATION: "compilation", NoteCode.HOST_PACE: "pace"}
"""Notes that have a row next to the speed, with its label."""


@dataclass(frozen=True, slots=True)
class Explored:
    """The parts of an exploration that its answer names; `request` and `report` are None if they are not known."""

    id: str
    request: ExplorationRequest | None
    report: DeviceReport | None = None
    is_over: bool = True


def answer_text(job: Explored, best: Recommendation | None, answer: Answer | None) -> AnswerText | None:
    """Return the text of an answer, or of the best so far; None while there is neither."""
    device = "" if job.report is None else f" on {job.report.hardware.device_name}"
    if answer is None and best is None:
        return None
    if best is None:
        nothing = answer.variants[0] if answer is not None else None
        title = f"No recommendation{device}: {(nothing and nothing.reason) or 'all of them failed'}"
        rows = [] if nothing is None else list(_remedy_rows(nothing.remedies))
    else:
        name = "" if job.request is None else f" for {job.request.explored.name}"
        said = _title(is_over=job.is_over, is_answered=answer is not None)
        title = f"{said}: {best.candidate.micro_batch_size}{name}{device}"
        rows = list(_rows(job, best, answer))
    if answer is None:
        return AnswerText(title=title, rows=tuple(rows))
    if best is not None and (shares := answer.variants[0].importance):
        said = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        rows.append(detail("what mattered", f"{said} of the variance of log speed, each by itself"))
    rows += [detail("time spent", text) for text in [_time_spent(answer.timings)] if text]
    table = variant_table(answer.variants) if len(answer.variants) > 1 else None
    return AnswerText(title=title, rows=tuple(rows), variants=table)


def _title(*, is_over: bool, is_answered: bool) -> str:
    if is_answered:
        return "Recommended micro_batch_size"
    return "Ended early; the best micro_batch_size until then" if is_over else "The best micro_batch_size so far"


def _rows(job: Explored, best: Recommendation, answer: Answer | None) -> Iterable[Row]:
    request, report = job.request, job.report
    yield from batch_rows(best, request)
    yield from _subject_rows(request, report)
    if best.plan is not None:
        first, *parts = best.plan.rows()
        yield main(*first)
        yield from (part(*each) for each in parts)
    yield main("settings", _settings(best, request))
    yield from (part(*texts) for d in DIMENSIONS if (texts := d.row(best.candidate)) is not None)
    yield from _speed_rows(best, request)
    yield detail("base", best.base.describe() if best.plan is None else best.plan.describe_base(best.base))
    yield from describe_tiling(best)
    if best.dropped_share is not None:
        yield main("capacity factor", _dropped(best.candidate, best.dropped_share))
    yield from _memory_rows(best)
    yield from memory_rows(best)
    yield from _text_rows(best)
    yield from _confidence_rows(job, best, answer)
    yield from alternative_rows(best)
    if request is not None:
        yield detail("allocator", request.allocator)
    yield from (detail("note", note.text) for note in best.notes if note.code not in SPEED_NOTES)
    yield from next_rows(job.id, best, request)


def _subject_rows(request: ExplorationRequest | None, report: DeviceReport | None) -> Iterable[Row]:
    if request is not None:
        parts = None if report is None else report.parts
        yield detail("explored", _context(request, parts))
        version, class_name = (None, None) if parts is None else (parts.target_version, parts.class_name)
        yield detail("measured", describe_target(request.target_name, version, class_name))
        if parts is not None and parts.switched_off:
            yield detail("off in trials", ", ".join(parts.switched_off))
    if report is not None:
        yield detail("device", f"{report.hardware.device_name}, {bytes_text(report.hardware.memory_bytes)}")


def _context(request: ExplorationRequest, parts: ModelParts | None) -> str:
    seq_length = request.explored.seq_length
    length = f", {seq_length} tokens per sequence" if seq_length is not None else ""
    is_named = request.execution is not None or request.executions is not None
    named = request.space.executions if is_named else ()
    execution = f", {' or '.join(named)}" if named else ""
    target = "" if request.target_name == BEXP else f"target {request.target_name}, "
    texts = "" if request.batching_of_texts is None else f", {request.batching_of_texts} texts"
    kept = request.training.precision
    precision = {"pure": "", "master": ", master weights"}.get(kept, f", {kept}")
    name = request.training.optimizer.name
    optimizer = "" if name == "adamw" else f", optimizer {name}"
    lora = "" if request.training.lora is None else f", {_adapters(request.training.lora, parts)}"
    quantized = "" if request.quantized is None else f", weights in {request.quantized.bits} bits"
    trainer = "" if request.trainer is None else f", for {request.runner.title}"
    return f"{target}{request.mode}{execution}{length}{texts}{precision}{optimizer}{lora}{quantized}{trainer}"


def _adapters(lora: LoRASpec, parts: ModelParts | None) -> str:
    kind = f"{'rank-stabilised ' if lora.use_rslora else ''}{'DoRA' if lora.use_dora else 'LoRA'}"
    adapted = {} if parts is None else parts.adapted
    trained = f" ({sum(adapted.values()):,} weights in {', '.join(adapted)})" if adapted else ""
    return f"{kind} of rank {lora.r}{trained}"


def changed_settings(candidate: Candidate, base: Candidate) -> str:
    """Return the settings in which a candidate differs from the base, the micro-batch apart."""
    plain = {f"micro_batch_size={candidate.micro_batch_size}", *base.describe().split()}
    return " ".join(word for word in candidate.describe().split() if word not in plain)


def _is_of_file(request: ExplorationRequest | None) -> bool:
    """Whether a base is the micro-batch of a trainer's own file, whose other settings a request does not keep."""
    return request is not None and request.trainer in FILES and request.base_micro_batch_size is not None


def _all_settings(candidate: Candidate) -> str:
    """Return the settings of a candidate that a trainer's own file has keys for, the micro-batch apart."""
    return candidate.describe().partition(" ")[2].removeprefix("bta_tile=off ")


def _settings(best: Recommendation, request: ExplorationRequest | None) -> str:
    """Return the settings to make. A trainer's own file is not known here, so all of them are listed."""
    if request is None or request.trainer is None or not _is_of_file(request):
        return changed_settings(best.candidate, best.base) or "nothing else to change"
    writes = "" if FILES[request.trainer].is_nested else ", as --into writes"
    return f"{_all_settings(best.candidate)}{writes}"


def _dropped(candidate: Candidate, share: float) -> str:
    return f"{candidate.capacity_factor:g}: experts drop {share:.1%} of the token-expert pairs under this routing"


def _speed_rows(best: Recommendation, request: ExplorationRequest | None) -> Iterable[Row]:
    """Yield the tokens/s to expect: those of the whole model if it was run, else those that its blocks compose."""
    about = "" if best.is_measured_whole else "about "
    shared = " of processor time (slower while others use these cores)" if best.says(NoteCode.SHARED_CORES) else ""
    rate = f"{about}{rate_text(best.expected_tokens_per_second, best.rate_unit)} per device{shared}"
    yield main("speed", f"{rate}, {_gain(best, request)}")
    whole = best.whole_model
    if best.candidate.is_whole:
        yield part("measured", "in whole steps of its own code")
    elif whole is None:
        yield part("composed", "of measured blocks; no whole model has confirmed it")
    else:
        yield part("whole model", "ran at that speed, so this is the figure to expect")
        composed = rate_text(whole.tokens_per_second / (1 + whole.step_error))
        yield part("composed", f"{composed} of measured blocks: {composed_off(whole)}")
    yield part("step", _step(best))
    yield from (main(SPEED_NOTES[note.code], note.text) for note in best.notes if note.code in SPEED_NOTES)


def _gain(best: Recommendation, request: ExplorationRequest | None) -> str:
    """Return the gains over the base, and over the best candidate without kernels of this project."""
    if best.candidate == best.base:
        return "which is the base"
    plain = "" if not changed_settings(best.candidate, best.base) else " without these settings"
    if _is_of_file(request):
        plain = f" of the file with {_all_settings(best.base)}"
    over = f"{best.performance:.2f}x micro_batch_size {best.base.micro_batch_size}{plain}"
    stock = best.alternative(Role.STOCK)
    if stock is not None and stock.ratio >= LEAST_GAIN and changed_settings(best.candidate, stock.candidate):
        over += f", {stock.ratio:.2f}x the best with stock kernels"
    return over


def _step(best: Recommendation) -> str:
    whole = best.whole_model
    step, timed = (best.step_seconds, best) if whole is None else (whole.step_seconds, whole.measurement)
    optimizer, communication = timed.optimizer_seconds, timed.communication_seconds
    parts = f"{seconds_text(timed.micro_step_seconds)} per micro-batch"
    if best.optimizer_seconds == 0:  # there is no training
        return parts
    if optimizer > 0:  # some runs of whole models leave it out
        parts += f", optimizer {seconds_text(optimizer)}"
    if communication is not None:
        parts += f", communication {seconds_text(communication)}"
    return f"{seconds_text(step)} per step ({parts})"


def _confidence_rows(job: Explored, best: Recommendation, answer: Answer | None) -> Iterable[Row]:
    """Yield the confidence, a way to make a provisional answer surer, and the noise between runs."""
    request = job.request
    within = 1.0 if request is None else 100 * request.tolerance
    said = f"{best.confidence} out of 100 that nothing is more than {within:g}% faster"
    if job.is_over and request is not None and is_provisional(best.confidence, request):
        said += f". Provisional: {request.budget.confidence_target} was asked for"
        said += "" if answer is None else f"; {surer_text(best, request, answer.serves_up_to)}"
    yield main("confidence", said)
    if best.run_noise is not None:
        stated = [f"{score} for {100 * float(level):g}%" for level, score in best.confidences.items()]
        yield part("by tolerance", ", ".join(stated))
        yield part("noise", f"two runs of a micro-step differ by {best.run_noise:.1%}")


def _memory_rows(best: Recommendation) -> Iterable[Row]:
    peak, required = bytes_text(best.expected_peak_bytes), bytes_text(best.required_bytes)
    kept = f", which leaves {best.headroom:.0%} of the memory free as headroom" if best.headroom else ""
    limit = bytes_text(best.memory_limit_bytes)
    yield main("memory", f"{peak} at the peak, {required} with reserve, of {limit}{kept}")
    if not best.candidate.is_whole:
        whole = "" if best.whole_model is None else f"{peak} in the whole model, "
        composed = f"{bytes_text(best.measured_peak_bytes)} composed of measured blocks"
        yield part("peak", f"{whole}{composed}, {bytes_text(best.predicted_peak_bytes)} predicted by formulas")
    yield from (part(name, f"{bytes_text(size):>10}") for name, size in memory_parts(best.memory))


def memory_parts(memory: MemoryParts) -> list[tuple[str, int]]:
    """Return the parts of the memory at the peak by name, without those of size 0."""
    return [(name.replace("_", " "), size) for name, size in memory.model_dump().items() if size]


def _describe_texts(texts: TextFigures) -> str:
    """Return the batching of texts of unequal length, and whether an epoch of them fits; full rows are all alike."""
    how = (
        texts.batching if texts.budget_tokens is None else f"whole, up to {texts.budget_tokens:,} tokens a micro-batch"
    )
    if texts.rows_are_full:
        return f"{how}; every row is full"
    return (
        f"{how}; {texts.padding_share:.0%} of the computed tokens are padding, which tokens/s leave out; "
        f"a chance of {texts.out_of_memory_probability:.1%} that an epoch runs out of memory"
    )


def _text_rows(best: Recommendation) -> Iterable[Row]:
    """Yield the effects of texts of unequal length: padding, and the peaks of an epoch."""
    texts = best.texts
    if texts is None:
        return
    known = "" if texts.counted else ", by its distribution"
    cut = f"; {texts.num_cut:,} are longer than a sequence and cut" if texts.num_cut else ""
    yield main("texts", _describe_texts(texts))
    yield part("epoch", f"{texts.num_texts:,} texts{known}{cut}")
    if texts.rows_are_full:
        return
    yield part(
        "peaks",
        f"{bytes_text(texts.expected_peak_bytes)} of a micro-batch in the mean, at most "
        f"{bytes_text(texts.high_peak_bytes)} of 99.9% of them; the peak above is that of the longest",
    )


def _remedy_rows(remedies: Sequence[Relaxation]) -> Iterable[Row]:
    """Yield the changes after which a candidate would fit."""
    if remedies:
        several = "any one of these changes is predicted to; the first one is preferred"
        yield main("to make it fit", several if len(remedies) > 1 else "this change is predicted to")
    for change in remedies:
        peak, required = bytes_text(change.predicted_peak_bytes), bytes_text(change.required_bytes)
        label = "changes" if change.kind is RelaxationKind.SEVERAL else change.kind.replace("_", " ")
        yield main(label, f"{change.change}: peak {peak}, {required} with reserve")


def _time_spent(timings: Mapping[str, float]) -> str:
    """Return the activities that took more than a hundredth of the longest, their total, and the wait before it.

    A recording is replayed in less time than its activities once took: there is no total then.
    """
    parts = {name: seconds for name, seconds in timings.items() if name not in (TOTAL, QUEUE)}
    least = max(parts.values(), default=0.0) / 100
    listed = ", ".join(f"{name.replace('_', ' ')} {seconds_text(s)}" for name, s in parts.items() if s > least)
    total = timings.get(TOTAL, 0.0)
    spent = f"{seconds_text(total)} in total: {listed}" if total > max(parts.values(), default=0.0) else listed
    waited = timings.get(QUEUE, 0.0)
    return f"{spent}; before it, {seconds_text(waited)} in the queue" if waited > least and spent else spent


def variant_table(variants: Sequence[VariantAnswer]) -> Table:
    """Return a table; the note of a row is its candidate, or the reason why there is none.

    Variants with a capacity factor show their memory and dropped tokens, in place of their parameters.
    """
    drops = any(variant.capacity_factor is not None for variant in variants)
    compared = "num_query_groups and capacity_factor" if drops else "num_query_groups"
    head = ("groups", "capacity" if drops else "parameters", "micro_batch_size", "tokens/s", "confidence")
    return Table(
        title=f"Variants by {compared} (separate models, not ranked)",
        head=(*head, *["peak", "dropped"] * drops),
        rows=tuple(_cells(variant, drops=drops) for variant in variants),
        notes=tuple(map(_below, variants)),
    )


def _cells(variant: VariantAnswer, *, drops: bool) -> tuple[str, ...]:
    best = variant.recommendation
    capacity = "none" if variant.capacity_factor is None else f"{variant.capacity_factor:g}"
    head = (str(variant.num_query_groups), capacity if drops else f"{variant.num_parameters:,}")
    if best is None:
        return (*head, *("-",) * (5 if drops else 3))
    speed = f"{best.expected_tokens_per_second:,.0f}"
    figures = (str(best.candidate.micro_batch_size), speed, str(best.confidence))
    memory = (bytes_text(best.expected_peak_bytes), f"{best.dropped_share or 0.0:.1%}") if drops else ()
    return (*head, *figures, *memory)


def _below(variant: VariantAnswer) -> str:
    best = variant.recommendation
    return variant.reason or "nothing fits" if best is None else best.candidate.describe()
