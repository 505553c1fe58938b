"""The answer of an exploration as text for a person."""

from __future__ import annotations

from collections.abc import Iterable

from explorer.cost_model.step import MemoryParts
from explorer.records.recommendation import (
    Alternative,
    Answer,
    Recommendation,
    Relaxation,
    RunnerUpCheck,
    VariantAnswer,
    WholeModelCheck,
)
from explorer.records.run_report import RunReport
from explorer.spec.candidate import Candidate
from explorer.spec.request import ExplorationRequest
from explorer.spec.target import BEXP

LABEL_WIDTH = 18


def render_answer(answer: Answer, request: ExplorationRequest | None, measured: str | None = None) -> str:
    """Return the whole answer, without a line break at its end; `measured` names the code that it is about."""
    lines: list[str] = []
    main = answer.variants[0]
    if main.recommendation is None:
        lines.append(f"No candidate fits: {main.reason or 'all of them failed'}")
        lines += _remedy_rows(main.remedies)
    else:
        lines += render_recommendation(main.recommendation, request, measured)
    if len(answer.variants) > 1:
        lines += ["", "Variants by num_query_groups (separate models, not ranked)", *_variant_table(answer.variants)]
    if answer.timings:
        spent = ", ".join(f"{name.replace('_', ' ')} {_seconds(seconds)}" for name, seconds in answer.timings.items())
        lines += ["", _row("time spent", spent)]
    return "\n".join(lines)


def render_recommendation(
    best: Recommendation, request: ExplorationRequest | None, measured: str | None = None
) -> list[str]:
    """Return the lines of one recommendation."""
    lines = [f"Recommended micro_batch_size: {best.candidate.micro_batch_size}{_context(request)}", ""]
    if measured is not None:
        lines.append(_row("measured", measured))
    lines += _candidate_rows(best.candidate)
    within = f" that it is within {100 * request.tolerance:g}% of the best" if request is not None else ""
    lines += [
        _row("throughput", f"{_rate(best.tokens_per_second)} per device, {best.performance:.2f}x base"),
        _row("base", best.base.describe()),
        _row("confidence", f"{best.confidence} out of 100{within}"),
        _row("step", _step(best)),
    ]
    batch = _batch(best, request)
    if batch is not None:
        lines.append(_row("batch", batch))
    lines += [
        _row(
            "peak memory",
            f"{bytes_text(best.predicted_peak_bytes)} predicted, {bytes_text(best.measured_peak_bytes)} measured",
        ),
        _row("with reserve", f"{bytes_text(best.required_bytes)} of {bytes_text(best.memory_limit_bytes)}"),
        *_memory_rows(best.memory),
    ]
    plain, largest = best.largest_without_recompute, best.largest_micro_batch
    if plain is not None:
        lines.append(_row("largest that fits", _alternative(plain)))
    if largest is not None and largest != plain:
        lines.append(_row("largest that fits" if plain is None else "  if recomputed", _alternative(largest)))
    if best.stock is not None:
        lines.append(_row("stock best", _alternative(best.stock)))
    if best.whole_model is not None:
        lines.append(_row("whole model", _whole_model(best.whole_model)))
    if best.runner_up is not None:
        lines.append(_row("runner-up", _runner_up(best.runner_up)))
    notes = list(best.notes)
    return lines + [_row("note", note) for note in notes]


def render_run_report(report: RunReport, best: Recommendation) -> str:
    """Return one line about a real run, compared with `best` if it used the micro-batch size of `best`."""
    line = (
        f"a run on {report.hardware} reached {_rate(report.tokens_per_second)} per device with micro_batch_size "
        f"{report.micro_batch_size} in {report.steps:,} steps"
    )
    if report.peak_bytes is not None:
        line += f", peak {bytes_text(report.peak_bytes)}"
    if report.micro_batch_size != best.candidate.micro_batch_size:
        return line
    speed = report.tokens_per_second / best.tokens_per_second
    peak = ""
    if report.peak_bytes is not None and best.measured_peak_bytes:
        peak = f", {report.peak_bytes / best.measured_peak_bytes:.2f}x the promised peak"
    return f"{line}: {speed:.2f}x the promised speed{peak}"


def bytes_text(count: int) -> str:
    """Return a number of bytes in the largest binary unit in which it is at least 1."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(size) >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


def memory_parts(memory: MemoryParts) -> list[tuple[str, int]]:
    """Return the parts of the memory at the peak by name, without those of size 0."""
    return [(name.replace("_", " "), size) for name, size in memory.model_dump().items() if size]


def _row(label: str, text: str) -> str:
    return f"  {label:<{LABEL_WIDTH}}{text}"


def _context(request: ExplorationRequest | None) -> str:
    if request is None:
        return ""
    described = request.model is not None or request.hf_config is not None
    length = f", {request.seq_length} tokens per sequence" if described else ""
    target = "" if request.target_name == BEXP else f"target {request.target_name}, "
    return f" for {request.model_name} ({target}{request.mode}, {request.execution}{length})"


def _candidate_rows(candidate: Candidate) -> Iterable[str]:
    if candidate.settings is not None:
        yield _row("settings", candidate.settings)
    if candidate.is_whole:
        return
    yield _row("bta_tile", str(candidate.bta_tile or "off"))
    yield _row("recompute", str(candidate.recompute))
    yield _row("attention", candidate.attention_backend)
    if candidate.expert_backend is not None:
        yield _row("experts", candidate.expert_backend)
    if candidate.context_parallel_layout is not None:
        over = f"{candidate.context_parallel_size} devices per sequence, {candidate.context_parallel_layout}"
        yield _row("context parallel", over)
    if candidate.sharding is not None:
        yield _row("sharding", str(candidate.sharding))


def _step(best: Recommendation) -> str:
    micro = f"{_seconds(best.micro_step_seconds)} per micro-batch"
    if best.optimizer_seconds == 0:
        return micro
    parts = f"{micro}, optimizer {_seconds(best.optimizer_seconds)}"
    if best.communication_seconds is not None:
        parts += f", communication {_seconds(best.communication_seconds)}"
    return f"{_seconds(best.step_seconds)} per step ({parts})"


def _batch(best: Recommendation, request: ExplorationRequest | None) -> str | None:
    asked = f"batch_size {request.batch_size}" if request is not None else "the batch_size"
    if best.grad_accum_steps is not None:
        return f"{asked} takes {best.grad_accum_steps} accumulation steps"
    if best.nearest_batch_sizes:
        nearest = " and ".join(str(size) for size in best.nearest_batch_sizes)
        return f"{asked} does not divide into whole micro-batches; the nearest that do: {nearest}"
    return None


def _memory_rows(memory: MemoryParts) -> Iterable[str]:
    for name, size in memory_parts(memory):
        yield _row(f"  {name}", f"{bytes_text(size):>10}")


def _alternative(other: Alternative) -> str:
    predicted = ", predicted in part" if other.predicted else ""
    return f"{other.gain:.2f}x over {other.candidate.describe()} ({_rate(other.tokens_per_second)}{predicted})"


def _whole_model(check: WholeModelCheck) -> str:
    return (
        f"{_rate(check.tokens_per_second)}, peak {bytes_text(check.measurement.peak_bytes)}; "
        f"the composed figures are off by {check.step_error:+.1%} in time, {check.peak_error:+.1%} in memory"
    )


def _runner_up(rival: RunnerUpCheck) -> str:
    if rival.whole_model is None:
        return f"{rival.candidate.describe()}: {rival.outcome} as a whole model: {rival.reason or 'no reason given'}"
    gain = f"{rival.gain:.3f}x over it as whole models: " if rival.gain is not None else ""
    return f"{rival.candidate.describe()}: {gain}{_whole_model(rival.whole_model)}"


def _remedy_rows(remedies: Iterable[Relaxation]) -> list[str]:
    rows = [
        _row(
            relaxation.kind.replace("_", " "),
            f"{relaxation.change}: peak {bytes_text(relaxation.predicted_peak_bytes)}, "
            f"{bytes_text(relaxation.required_bytes)} with reserve",
        )
        for relaxation in remedies
    ]
    title = "Any one of these changes is predicted to make it fit. The first one is preferred."
    return ["", title, *rows] if rows else []


def _variant_table(variants: Iterable[VariantAnswer]) -> list[str]:
    rows = [("groups", "parameters", "micro_batch_size", "tokens/s", "confidence", "candidate")]
    for variant in variants:
        best = variant.recommendation
        head = (str(variant.num_query_groups), f"{variant.num_parameters:,}")
        if best is None:
            rows.append((*head, "-", "-", "-", variant.reason or "nothing fits"))
        else:
            size = str(best.candidate.micro_batch_size)
            rate = f"{best.tokens_per_second:,.0f}"
            rows.append((*head, size, rate, str(best.confidence), best.candidate.describe()))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return ["  " + "  ".join([*(f"{row[i]:>{widths[i]}}" for i in range(5)), row[5]]) for row in rows]


def _rate(tokens_per_second: float) -> str:
    digits = 0 if tokens_per_second >= 100 else 1
    return f"{tokens_per_second:,.{digits}f} tokens/s"


def _seconds(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
