"""What each step of an exploration says, and what it does not say twice."""

from __future__ import annotations

from bexp.explorer.records.event import EventCode, EventDraft, Progress
from bexp.explorer.search.loop import ProgressLog
from tests.explorer.search.small import recommendation

NOTE = EventDraft(code=EventCode.WARNING, message="something")


def codes(step: Progress) -> list[EventCode]:
    return [event.code for event in step.events]


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
