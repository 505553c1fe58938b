"""What each step of an exploration says, and what it does not say twice."""

from __future__ import annotations

import pytest

from bexp.explorer.records.event import EventCode, EventDraft, Progress
from bexp.explorer.records.recommendation import Recommendation
from bexp.explorer.records.trial import Trial
from bexp.explorer.search.explore import open_candidates
from bexp.explorer.search.progress_log import ProgressLog
from bexp.explorer.spec.request import ExplorationRequest
from tests.explorer.search.small import context, recommendation, small_request, small_space, trial

NOTE = EventDraft(code=EventCode.WARNING, message="something")


def log_of(req: ExplorationRequest, trials: tuple[Trial, ...] = (), index: int = 0) -> ProgressLog:
    log = ProgressLog(is_main=index == 0)
    open_candidates(context(req, trials, index=index), lambda *_: small_space(req), log)
    return log


def codes(step: Progress) -> list[EventCode]:
    return [event.code for event in step.events]


def test_the_first_step_says_what_the_space_is_and_no_other_does() -> None:
    log = log_of(small_request())
    assert log.is_pending
    log.add(NOTE)
    first = log.step(trial(0), [NOTE])
    assert codes(first) == [EventCode.SPACE, EventCode.WARNING, EventCode.WARNING]
    assert first.space == small_space(small_request()).legal.summarize()
    assert first.trial == trial(0)
    assert not log.is_pending
    second = log.step()
    assert (second.events, second.space, second.trial) == ((), None, None)


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


@pytest.mark.parametrize(
    "changes", [{"confidence": 51}, {"performance": 1.26}], ids=["another confidence", "another performance"]
)
def test_a_recommendation_is_told_when_its_message_changes(changes: dict[str, float]) -> None:
    log = ProgressLog()
    found = recommendation(confidence=50, performance=1.25)
    assert told(log, found=found) == [EventCode.RECOMMENDATION]
    assert told(log, NOTE, found=found) == [EventCode.WARNING]
    assert told(log, found=found.model_copy(update={"tokens_per_second": 7.0})) == [], "the message is the same"
    changed = found.model_copy(update=changes)
    assert told(log, NOTE, found=changed) == [EventCode.WARNING, EventCode.RECOMMENDATION]
    assert told(log, found=changed) == []


def test_what_an_earlier_lease_has_told_is_not_told_again() -> None:
    log = ProgressLog()
    log.resume(None)
    found = recommendation(confidence=50)
    log.resume(found)
    assert told(log, found=found) == []


def test_only_the_main_variants_recommendation_is_the_jobs() -> None:
    found = recommendation(confidence=50)
    assert ProgressLog().step(None, None, found).recommendation == found
    other = ProgressLog(is_main=False).step(None, None, found)
    assert other.recommendation is None
    assert codes(other) == [EventCode.RECOMMENDATION]
