"""The part of an answer about its other choices: the micro-batch that divides the batch, and how to save memory."""

from __future__ import annotations

from collections.abc import Iterable

from bexp.explorer.answers.text import joined, row, steps_text
from bexp.explorer.model.amounts import bytes_text, rate_text, slower_text
from bexp.explorer.records.recommendation import WITHIN, Alternative, Recommendation, Role
from bexp.explorer.request.request import ExplorationRequest


def second_figure(best: Recommendation, request: ExplorationRequest | None) -> Iterable[str]:
    """Yield the line of the micro-batch that divides the stated batch, or the batch sizes that one divides."""
    asked, size, other = _asked(request), best.candidate.micro_batch_size, best.alternative(Role.DIVIDING)
    if other is None:
        if best.dividing_batch_sizes:
            yield no_dividing_text(best, request)
        return
    steps = _steps(other.grad_accum_steps or 1, request)
    if request is not None and request.keeps_batch:
        yield f"It makes {asked} in {steps}"
    elif other.candidate == best.candidate:
        yield f"For {asked}: {size} divides it, in {steps}"
    else:
        compared = slower_text(other.loss, str(size))
        yield f"For {asked}: {other.candidate.micro_batch_size}, in {steps}, {compared}, confidence {other.confidence}"


def no_dividing_text(best: Recommendation, request: ExplorationRequest | None) -> str:
    """Return that nothing divides the requested batch, and the nearest batch sizes that something divides."""
    if best.dividing_batch_sizes:
        nearest = joined(best.dividing_batch_sizes)
        return f"no micro-batch that fits divides {_asked(request)}; the nearest batch sizes with one are {nearest}"
    return "no batch_size was stated, so there is nothing to divide: `--batch-size N` states one"


def batch_rows(best: Recommendation, request: ExplorationRequest | None) -> Iterable[str]:
    """Yield what the recommended micro-batch leaves of the batch, and the candidate that divides it."""
    if best.nearest_batch_sizes:
        nearest = joined(best.nearest_batch_sizes)
        whole = f"whole micro-batches of {best.candidate.micro_batch_size}"
        yield row("batch", f"{_asked(request)} does not divide into {whole}; the nearest that do: {nearest}")
    other = best.alternative(Role.DIVIDING)
    if other is not None and other.candidate != best.candidate:
        predicted = ", predicted in part: `--micro-batch-size auto` measures it" if other.predicted else ""
        figures = f"{rate_text(other.tokens_per_second)}, peak {bytes_text(other.expected_peak_bytes)}"
        yield row("for the batch", f"{other.candidate.describe()}: {figures}, confidence {other.confidence}{predicted}")


def tiling_text(best: Recommendation, untiled: Alternative) -> str:
    """Return what tiling gains or costs.

    No untiled candidate is run whole for a request that excludes them, so that both figures are composed of blocks.
    """
    gain = best.composed_tokens_per_second / untiled.composed_tokens_per_second
    change = f"{'gains' if gain >= 1.0 else 'costs'} {abs(gain - 1.0):.1%}"
    predicted = ", predicted in part" if untiled.predicted else ""
    over = f"{best.ratio_text(gain)} over {untiled.candidate.describe()}"
    return f"BTA {change}: {over}, as measured blocks compose both{predicted}"


def _asked(request: ExplorationRequest | None) -> str:
    if request is None:
        return "the batch"
    if request.batch_size is None:  # a training command's, which is known to its worker alone
        return "the command's batch"
    return f"batch_size {request.batch_size}"


def _steps(count: int, request: ExplorationRequest | None) -> str:
    """Return a number of accumulation steps, or of micro-batches of an evaluation."""
    if request is not None and request.mode == "eval":
        return f"{count} micro-batch{'' if count == 1 else 'es'}"
    return steps_text(count)


def saving_rows(best: Recommendation) -> Iterable[str]:
    """Yield the fastest candidate and the smallest peaks near it."""
    fastest = best.alternative(Role.FASTEST)
    if fastest is None:
        return
    chosen = f"memory is preferred: the fastest is {fastest.candidate.describe()}" if best.prefer == "memory" else None
    fast = f"{bytes_text(fastest.expected_peak_bytes)} at {rate_text(fastest.tokens_per_second)}"
    yield row("memory or speed", f"{chosen}, {fast}" if chosen else f"{fast} is the fastest")
    before = fastest.candidate
    for role, within in WITHIN.items():
        choice = best.alternative(role)
        if choice is None:
            continue
        label = f"  within {within:.0%}"
        if choice.candidate == before:
            yield row(label, "nothing smaller is known" if before == fastest.candidate else "the same")
            continue
        peak, loss = bytes_text(choice.expected_peak_bytes), max(0.0, 1.0 - fastest.ratio / choice.ratio)
        yield row(label, f"{peak}, {slower_text(loss)}: {choice.candidate.describe()}")
        before = choice.candidate
