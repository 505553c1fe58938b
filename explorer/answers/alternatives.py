"""The rows of an answer about other candidates: the best for the batch, smaller peaks, and alternatives."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from bexp.explorer.answers.rows import Row, detail, main, part
from bexp.explorer.answers.text import joined
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.parallelism import expert_sharing
from bexp.explorer.model.amounts import bytes_text, rate_text, slower_text
from bexp.explorer.records.recommendation import WITHIN, Alternative, NoteCode, Recommendation, Role, WholeModelCheck
from bexp.explorer.request.request import ExplorationRequest


def batch_rows(best: Recommendation, request: ExplorationRequest | None) -> Iterable[Row]:
    """Yield the best micro-batch that divides the stated batch, or the nearest batch sizes that one divides."""
    asked, size, other = _asked(request), best.candidate.micro_batch_size, best.alternative(Role.DIVIDING)
    if other is None:
        if best.dividing_batch_sizes:
            yield main("batch", no_dividing_text(best, request))
    else:
        steps = _steps(other.grad_accum_steps or 1, request)
        if request is not None and request.keeps_batch:
            yield main("batch", f"{asked} in {steps}")
        elif other.candidate == best.candidate:
            yield main("batch", f"{asked}: {size} divides it, in {steps}")
        else:
            compared = f"{slower_text(other.loss, str(size))}, confidence {other.confidence}"
            yield main("batch", f"{asked}: {other.candidate.micro_batch_size}, in {steps}, {compared}")
    if best.nearest_batch_sizes:
        whole = f"{asked} does not divide into whole micro-batches of {size}"
        yield part("", f"{whole}; the nearest that do: {joined(best.nearest_batch_sizes)}")
    if other is not None and other.candidate != best.candidate:
        measures = ", predicted in part: `--micro-batch-size auto` measures it" if other.predicted else ""
        figures = f"{rate_text(other.tokens_per_second, best.rate_unit)}, peak {bytes_text(other.expected_peak_bytes)}"
        text = f"{other.candidate.describe()}: {figures}, confidence {other.confidence}{measures}"
        yield part(other.role.label, text)


def no_dividing_text(best: Recommendation, request: ExplorationRequest | None) -> str:
    """Return the sentence that no candidate divides the requested batch, with the nearest sizes that one divides."""
    if best.dividing_batch_sizes:
        nearest = joined(best.dividing_batch_sizes)
        return f"no micro-batch that fits divides {_asked(request)}; the nearest batch sizes with one are {nearest}"
    return "no batch_size was stated, so there is nothing to divide: `--batch-size N` states one"


def describe_tiling(best: Recommendation) -> Iterable[Row]:
    """Yield the gain or the cost of tiling, or that it is not known.

    For a request that excludes untiled candidates none of them is run whole, so both figures are composed of blocks.
    """
    yield from (main(Role.UNTILED.label, note.text) for note in best.notes if note.code is NoteCode.NOTHING_UNTILED)
    for other in best.alternatives_of(Role.UNTILED):
        gain = best.composed_tokens_per_second / other.composed_tokens_per_second
        change = f"{'gains' if gain >= 1.0 else 'costs'} {abs(gain - 1.0):.1%}"
        over = f"{gain:.2f}x over {other.candidate.describe()}"
        yield main(other.role.label, f"BTA {change}: {over}, as measured blocks compose both{_predicted(other)}")


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
    return f"{count} accumulation step{'' if count == 1 else 's'}"


def memory_rows(best: Recommendation) -> Iterable[Row]:
    """Yield the fastest candidate and the smallest peaks near it; a smaller size that is level with it is named."""
    fastest = best.alternative(Role.FASTEST)
    if fastest is None:
        return
    label, near = fastest.role.label, best.alternative(Role.WITHIN_1_PERCENT)
    fast = f"{bytes_text(fastest.expected_peak_bytes)} at {rate_text(fastest.tokens_per_second, best.rate_unit)}"
    if best.prefer == "memory":
        yield detail(label, f"memory is preferred: the fastest is {fastest.candidate.describe()}, {fast}")
    elif near is not None and _is_smaller_size(near.candidate, fastest.candidate):
        level = f"{near.candidate.micro_batch_size} and {fastest.candidate.micro_batch_size} are level"
        smaller = f"{bytes_text(near.expected_peak_bytes)} in place of {fast}"
        yield main(label, f"{level}: {smaller}; `--prefer memory` takes the smaller peak")
    else:
        yield detail(label, f"{fast} is the fastest")
    before = fastest.candidate
    for role in WITHIN:
        choice = best.alternative(role)
        if choice is None:
            continue
        if choice.candidate == before:
            yield part(role.label, "nothing smaller is known" if before == fastest.candidate else "the same")
            continue
        peak, loss = bytes_text(choice.expected_peak_bytes), max(0.0, 1.0 - fastest.ratio / choice.ratio)
        yield part(role.label, f"{peak}, {slower_text(loss)}: {choice.candidate.describe()}")
        before = choice.candidate


def _is_smaller_size(candidate: Candidate, other: Candidate) -> bool:
    """Return whether two candidates differ in their size alone, and the first has the smaller one."""
    size = candidate.micro_batch_size
    return size < other.micro_batch_size and candidate == other.model_copy(update={"micro_batch_size": size})


def alternative_rows(best: Recommendation) -> Iterable[Row]:
    """Yield the other candidates, each with its comparison."""
    plain = best.alternative(Role.LARGEST_WITHOUT_RECOMPUTE)
    for other in best.alternatives:
        if (describe := TEXTS.get(other.role)) is None:
            continue
        text = describe(best, other)
        if other.role is not Role.LARGEST_MICRO_BATCH:
            yield detail(other.role.label, text)
        elif plain is None:
            yield detail(Role.LARGEST_WITHOUT_RECOMPUTE.label, text)
        elif plain.candidate != other.candidate:
            yield part(other.role.label, text)


def _compared(best: Recommendation, other: Alternative) -> str:
    if other.candidate == best.candidate:
        return f"{other.ratio:.2f}x: it is the recommended one"
    rate = rate_text(other.tokens_per_second, best.rate_unit)
    return f"{other.ratio:.2f}x over {other.candidate.describe()} ({rate}{_predicted(other)})"


def _runner_up(best: Recommendation, rival: Alternative) -> str:
    name, check = rival.name, rival.whole_model
    if check is None:
        return f"{name}: {rival.outcome} as a whole model: {rival.reason or 'no reason given'}"
    reached = f"{rate_text(check.tokens_per_second, best.rate_unit)} as a whole model"
    return f"{name}: {reached}, and its blocks compose {composed_off(check)}{_gain(best, rival)}"


def _gain(best: Recommendation, rival: Alternative) -> str:
    """Return the speed of the recommended candidate against the runner-up; equal if only noise makes it slower."""
    if best.whole_model is None:
        return ""
    if rival.ratio >= 1.0:
        return f"; the recommended one is {rival.ratio:.3f}x as fast"
    if best.prefer == "memory":
        return f"; the recommended one is {rival.ratio:.3f}x as fast and needs less memory"
    return "; the recommended one is as fast, within the noise of such runs"


def _expert_mode(best: Recommendation, other: Alternative) -> str:
    own = None if best.plan is None else best.plan.parallelism
    return f"{expert_sharing(own)}: {other.ratio:.2f}x over {expert_sharing(other.mesh)}, {_in_short(best, other)}"


def _in_short(best: Recommendation, other: Alternative) -> str:
    """Return what distinguishes an alternative of devices that share the model, with its tokens/s."""
    sizes = "" if other.mesh is None else other.mesh.describe()
    settings = f"micro_batch_size={other.candidate.micro_batch_size} recompute={other.candidate.recompute}"
    return f"{sizes} {settings} ({rate_text(other.tokens_per_second, best.rate_unit)}{_predicted(other)})"


def composed_off(check: WholeModelCheck) -> str:
    """Return the errors of the composed step and peak against those of the whole model, in words."""
    step, peak = _off(check.step_error, "shorter", "longer"), _off(check.peak_error, "lower", "higher")
    return f"a step that is {step}, and a peak that is {peak}"


def _off(error: float, less: str, more: str) -> str:
    """Return a relative error in words."""
    share = f"{abs(error):.1%}"
    return "equal" if share == "0.0%" else f"{share} {less if error < 0 else more}"


def _predicted(other: Alternative) -> str:
    return ", predicted in part" if other.predicted else ""


TEXTS: dict[Role, Callable[[Recommendation, Alternative], str]] = {
    **dict.fromkeys((Role.LARGEST_WITHOUT_RECOMPUTE, Role.LARGEST_MICRO_BATCH, Role.STOCK, Role.UNDIVIDED), _compared),
    Role.RUNNER_UP: _runner_up,
    Role.EXPERT_MODE: _expert_mode,
    Role.OTHER_MESH: lambda best, other: f"{other.ratio:.2f}x over {_in_short(best, other)}",
}
"""The functions that describe an alternative in a row of its own."""
