"""What each step of an exploration says, and what it does not say twice."""

from __future__ import annotations

from bexp.explorer.records.event import EventCode, EventDraft, Progress
from bexp.explorer.records.recommendation import Recommendation
from bexp.explorer.records.trial import Trial
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.explore import open_candidates
from bexp.explorer.search.loop import ProgressLog
from tests.explorer.search.small import context, recommendation, small_request, small_space, trial

NOTE = EventDraft(code=EventCode.WARNING, message="something")


def log_of(req: ExplorationRequest, trials: tuple[Trial, ...] = (), index: int = 0) -> ProgressLog:
    log = ProgressLog(is_main=index == 0)
    open_candidates(context(req, trials, index=index), lambda *_: small_space(req), log)
    return log


def codes(step: Progress) -> list[EventCode]:
    return [event.code for event in step.events]


def test_after_a_resume_the_space_is_not_said_again() -> None:
    step = log_of(small_request(), trials=(trial(0),)).step(None, [NOTE])
    assert codes(step) == [EventCode.WARNING]
    assert step.space is None


def test_one_of_several_variants_is_announced() -> None:
    req = small_request(num_query_groups=[4, 2])
    assert codes(log_of(req).step()) == [EventCode.VARIANT, EventCode.SPACE]
    other = log_of(req, index=1).step()
    assert codes(other) == [EventCode.VARIANT, EventCode.SPACE]
    assert other.space is None, "the job's space is that of its main variant"


def test_the_space_is_told_with_the_limit_of_the_request() -> None:
    step = log_of(small_request(memory_limit_gib=2)).step()
    assert step.events[0].data["memory_limit_bytes"] == 2 * 2**30


def told(log: ProgressLog, *events: EventDraft, found: Recommendation | None = None) -> list[EventCode]:
    return codes(log.step(None, list(events), found))


def test_what_an_earlier_lease_has_told_is_not_told_again() -> None:
    log = ProgressLog()
    log.resume(None)
    found = recommendation(confidence=50)
    log.resume(found)
    assert told(log, found=found) == []


def test_only_the_main_variants_recommendation_is_the_jobs() -> None:
    found = recommendation(confidence=50)
    for is_main in (True, False):
        step = ProgressLog(is_main=is_main).step(None, None, found)
        assert (step.recommendation, step.is_main) == (found, is_main)
        assert codes(step) == [EventCode.RECOMMENDATION]


def test_a_line_follows_its_text_and_the_recommendation_its_values() -> None:
    """A change in the third digit of a ratio, or of tokens/s, is in no line."""
    log, found = ProgressLog(), recommendation(performance=1.44241)
    changed = [found.model_copy(update=each) for each in ({"performance": 1.44271}, {"tokens_per_second": 1300.0})]
    steps = [log.step(None, [NOTE], each) for each in (found, *changed)]
    assert [step.recommendation for step in steps] == [found, *changed]
    assert [EventCode.RECOMMENDATION in codes(step) for step in steps] == [True, False, False]
