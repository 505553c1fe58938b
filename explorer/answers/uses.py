"""The next steps after an answer: commands that use it, and ways to make it surer."""

from __future__ import annotations

from collections.abc import Iterable

from bexp.explorer.answers.rows import Row, brief, detail
from bexp.explorer.records.recommendation import NoteCode, Recommendation
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.trainer_terms import own_formats


def is_provisional(confidence: int, request: ExplorationRequest) -> bool:
    """Return whether a search has ended below the confidence that its request asks for."""
    return confidence < request.budget.confidence_target


def surer_text(best: Recommendation, request: ExplorationRequest, served: int, *, for_program: bool = False) -> str:
    """Return a way to make a provisional answer surer. Answers up to the confidence `served` are given again.

    A person gets options of commands. A program gets fields of a request, with the options behind them. Where more
    trials do not help, the tolerance is named for which the answer is sure as it is.
    """
    if best.says(NoteCode.NOISE):
        text = "explore again when nothing else runs here: runs differ too much for more trials to help"
        return f"{text}{_sure_within(best, request)}"
    budget = request.budget
    if served >= budget.confidence_target:  # a larger budget would get this answer again
        return f"nothing that is left to measure is expected to change the answer{_sure_within(best, request)}"
    limits = f"{budget.max_seconds:g} s of trials and {budget.max_trials} trials"
    fields = "budget.max_seconds or budget.max_trials (options --max-seconds, --max-trials)"
    higher = fields if for_program else "--max-seconds or --max-trials"
    return f"explore again with a higher {higher}: the budget was {limits}"


def _sure_within(best: Recommendation, request: ExplorationRequest) -> str:
    """Return the least wider tolerance for which the confidence reaches the target, if there is one."""
    levels = {float(level): score for level, score in best.confidences.items() if float(level) > request.tolerance}
    sure = [level for level, score in levels.items() if score >= request.budget.confidence_target]
    if not sure:
        return ""
    return f". It is {levels[min(sure)]} for {min(sure):.0%}, which `tolerance: {min(sure):g}` asks for"


def next_rows(job_id: str, best: Recommendation, request: ExplorationRequest | None) -> Iterable[Row]:
    """Yield the command that sets the trainer up, and all commands that use the answer."""
    command, rest = f"bexp best {job_id}", "for the whole answer"
    if best.notes:
        rest += f" with {len(best.notes)} note{'' if len(best.notes) == 1 else 's'}"
    formats, is_named = own_formats(best, request), request is not None and request.trainer is not None
    is_applied = not best.is_shared and (request is None or not request.is_own_code)
    if best.plan is not None or not (formats if is_named else is_applied):
        yield brief("next", f"`{command} -v` {rest}")
    elif is_named:
        yield brief("next", f"`{command} --format {formats[0]}`, -v {rest}")
    else:
        named = ", --format NAME for a trainer" if formats else ""
        yield brief("next", f"`{command} --json > best.json` for bexp.apply{named}, -v {rest}")
    if formats:
        name = formats[0] if len(formats) == 1 else f"NAME, where NAME is one of {', '.join(formats)}"
        yield detail("for a trainer", f"{command} --format {name}")
    if is_applied:
        yield detail("for bexp.apply", f"{command} --json > best.json")
    yield detail("as a page", f"bexp report {job_id} --out report.html")
