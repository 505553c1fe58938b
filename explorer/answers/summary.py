"""The answer of an exploration in six lines: what to run, what it gains, and what to do with it."""

from __future__ import annotations

from collections.abc import Iterable

from bexp.explorer.answers.answer import device_text, is_provisional, nothing_text, remedy_rows, texts_text
from bexp.explorer.answers.choices import second_figure, tiling_text
from bexp.explorer.answers.plan import mesh_text
from bexp.explorer.answers.text import WIDTH, row, wrap
from bexp.explorer.answers.variants import variant_lines
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.formats.trainers.reader import FILES
from bexp.explorer.model.amounts import bytes_text, rate_text
from bexp.explorer.model.target import BEXP, TRANSFORMERS
from bexp.explorer.records.recommendation import (
    Answer,
    NoteCode,
    Recommendation,
    Role,
)
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.trainer_formats import own_formats

LEAST_GAIN = 1.01
"""The least gain over the best candidate with stock kernels that is worth a word."""
FRESH = "fresh: true (option --fresh)"


def render_summary(
    answer: Answer, job_id: str, request: ExplorationRequest | None, width: int = WIDTH, device: str | None = None
) -> str:
    """Return the lines of an answer for a person who wants to use it; `bexp best ID -v` prints all of it.

    The first one names the `device` that was measured.
    """
    main = answer.variants[0]
    if main.recommendation is None:
        lines = [nothing_text(main, device), *remedy_rows(main.remedies)]
    else:
        lines = list(_rows(main.recommendation, job_id, request, answer.serves_up_to, device))
    if len(answer.variants) > 1:
        lines += ["", *variant_lines(answer.variants)]
    return "\n".join(wrap(lines, width))


def _rows(
    best: Recommendation, job_id: str, request: ExplorationRequest | None, served: int, device: str | None
) -> Iterable[str]:
    name = "" if request is None else f" for {request.explored.name}"
    yield f"Recommended micro_batch_size: {best.candidate.micro_batch_size}{name}{device_text(device)}"
    for line in second_figure(best, request):
        yield row("batch", line.removeprefix("It makes ").removeprefix("For "))
    if best.plan is not None:
        yield row("mesh", mesh_text(best.plan))
    yield row("settings", _settings(best, request))
    about = "" if best.whole_model is not None or best.candidate.is_whole else "about "
    rate = f"{about}{rate_text(best.expected_tokens_per_second)} per device"
    yield row("speed", f"{rate}{_shared_cores(best)}, {_gain(best, request)}")
    if (untiled := best.alternative(Role.UNTILED)) is not None:
        yield row("tiling", tiling_text(best, untiled))
    yield from (row("tiling", note.text) for note in best.notes if note.code is NoteCode.NOTHING_UNTILED)
    if best.dropped_share is not None:
        yield row("dropped", f"{best.dropped_share:.1%} of the token-expert pairs under this routing")
    reserved = f"{bytes_text(best.required_bytes)} with reserve, of {bytes_text(best.memory_limit_bytes)}"
    yield row("memory", f"{bytes_text(best.expected_peak_bytes)} at the peak, {reserved}")
    if best.texts is not None:
        yield row("texts", texts_text(best.texts))
    yield row("confidence", _confidence(best, request, served))
    yield row("next", _next(best, job_id, request))


def _shared_cores(best: Recommendation) -> str:
    """Return that a run beside other processes is slower than its speed, which is in time of the processor."""
    is_slower = best.says(NoteCode.SHARED_CORES)
    return " of processor time (slower while others use these cores)" if is_slower else ""


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
    """Return what to set. What a trainer's own file says is not known here, so that all of it is listed."""
    if request is None or request.trainer is None or not _is_of_file(request):
        return changed_settings(best.candidate, best.base) or "nothing else to change"
    writes = "" if FILES[request.trainer].is_nested else ", as --into writes"
    return f"{_all_settings(best.candidate)}{writes}"


def _gain(best: Recommendation, request: ExplorationRequest | None) -> str:
    """Return the gains over the base, and over the best candidate without kernels of this project."""
    if best.candidate == best.base:
        return "which is the base"
    plain = "" if not changed_settings(best.candidate, best.base) else " without these settings"
    if _is_of_file(request):
        plain = f" of the file with {_all_settings(best.base)}"
    over = f"{best.ratio_text(best.performance)} micro_batch_size {best.base.micro_batch_size}{plain}"
    stock = best.alternative(Role.STOCK)
    if stock is not None and stock.ratio >= LEAST_GAIN and changed_settings(best.candidate, stock.candidate):
        over += f", {best.ratio_text(stock.ratio)} the best with stock kernels"
    return over


def _confidence(best: Recommendation, request: ExplorationRequest | None, served: int) -> str:
    within = 1.0 if request is None else 100 * request.tolerance
    said = f"{best.confidence} out of 100 that nothing is more than {within:g}% faster"
    if request is None or not is_provisional(best.confidence, request):
        return said
    return f"{said}. Provisional: {request.budget.confidence_target} was asked for; {surer_text(best, request, served)}"


def surer_text(best: Recommendation, request: ExplorationRequest, served: int, *, for_program: bool = False) -> str:
    """Return what makes a provisional answer surer. Answers up to the confidence `served` are given again.

    A person reads options of commands, and a program fields of a request, with the options behind them.
    """
    budget = request.budget
    if served >= budget.confidence_target:  # a larger budget would get this answer again
        fresh = FRESH if for_program else "--fresh"
        return f"explore again with {fresh}: the search ended before its budget was spent"
    if best.says(NoteCode.NOISE):
        return "explore again when nothing else runs here: runs differ too much for more trials to help"
    limits = f"{budget.max_seconds:g} s of trials and {budget.max_trials} trials"
    fields = "budget.max_seconds or budget.max_trials (options --max-seconds, --max-trials)"
    higher = fields if for_program else "--max-seconds or --max-trials"
    return f"explore again with a higher {higher}: the budget was {limits}"


def _next(best: Recommendation, job_id: str, request: ExplorationRequest | None) -> str:
    """Return the command that makes the trainer run so, and the one that tells the rest."""
    command, rest = f"bexp best {job_id}", "-v for the whole answer"
    if best.notes:
        rest += f" with {len(best.notes)} note{'' if len(best.notes) == 1 else 's'}"
    target = BEXP if request is None else request.target_name
    formats, is_named = own_formats(best, request), request is not None and request.trainer is not None
    if best.plan is not None or target not in {BEXP, TRANSFORMERS} or (is_named and not formats):
        return f"`{command} -v`{rest.removeprefix('-v')}"
    if is_named:
        return f"`{command} --format {formats[0]}`, {rest}"
    named = ", --format NAME for a trainer" if formats else ""
    return f"`{command} --json > best.json` for bexp.apply{named}, {rest}"
