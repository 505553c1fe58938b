"""What each step of an exploration says, and what it does not say twice."""

from __future__ import annotations

import pytest

from bexp.explorer.records.event import EventCode, EventDraft
from bexp.explorer.records.recommendation import Recommendation
from bexp.explorer.records.trial import Trial
from bexp.explorer.search.progress_log import ProgressLog
from bexp.explorer.spec.request import ExplorationRequest
from tests.explorer.search.small import context, recommendation, small_request, small_space, trial

NOTE = EventDraft(code=EventCode.WARNING, message="something")


def log_of(req: ExplorationRequest | None = None, trials: tuple[Trial, ...] = (), index: int = 0) -> ProgressLog:
    req = req or small_request()
    return ProgressLog(context(req, trials, index=index), small_space(req))


def codes(log: ProgressLog, *events: EventDraft, found: Recommendation | None = None) -> list[EventCode]:
    return [event.code for event in log.step(None, list(events), found).events]


def test_the_first_step_says_what_the_space_is_and_no_other_does() -> None:
    log = log_of()
    log.add(NOTE)
    first = log.step(trial(0), [NOTE])
    assert [event.code for event in first.events] == [EventCode.SPACE, EventCode.WARNING, EventCode.WARNING]
    assert first.space == small_space(small_request()).legal.summarize()
    assert first.trial == trial(0)
    second = log.step()
    assert (second.events, second.space, second.trial) == ((), None, None)


def test_after_a_resume_the_space_is_not_said_again() -> None:
    step = log_of(trials=(trial(0),)).step(None, [NOTE])
    assert [event.code for event in step.events] == [EventCode.WARNING]
    assert step.space is None


def test_one_of_several_variants_is_announced() -> None:
    req = small_request(num_query_groups=[4, 2])
    assert codes(log_of(req)) == [EventCode.VARIANT, EventCode.SPACE]
    other = log_of(req, index=1).step()
    assert [event.code for event in other.events] == [EventCode.VARIANT, EventCode.SPACE]
    assert other.space is None, "the job's space is that of its main variant"


def test_the_space_is_told_with_the_limit_of_the_request() -> None:
    step = log_of(small_request(memory_limit_gib=2)).step()
    assert step.events[0].data["memory_limit_bytes"] == 2 * 2**30
    assert "no micro_batch_size above" not in step.events[0].message
    assert "no micro_batch_size above 3," in log_of(small_request(batch_size=3)).step().events[0].message


@pytest.mark.parametrize(
    "changes", [{"confidence": 51}, {"performance": 1.26}], ids=["another confidence", "another performance"]
)
def test_a_recommendation_is_told_when_its_message_changes(changes: dict[str, float]) -> None:
    log = log_of(trials=(trial(0),))
    found = recommendation(confidence=50, performance=1.25)
    assert codes(log, found=found) == [EventCode.RECOMMENDATION]
    assert codes(log, NOTE, found=found) == [EventCode.WARNING]
    assert codes(log, found=found.model_copy(update={"tokens_per_second": 7.0})) == [], "the message is the same"
    changed = found.model_copy(update=changes)
    assert codes(log, NOTE, found=changed) == [EventCode.WARNING, EventCode.RECOMMENDATION]
    assert codes(log, found=changed) == []


def test_what_an_earlier_lease_has_told_is_not_told_again() -> None:
    log = log_of(trials=(trial(0),))
    log.resume(None)
    found = recommendation(confidence=50)
    log.resume(found)
    assert codes(log, found=found) == []


def test_only_the_main_variants_recommendation_is_the_jobs() -> None:
    req = small_request(num_query_groups=[4, 2])
    found = recommendation(confidence=50)
    assert log_of(req).step(None, None, found).recommendation == found
    other = log_of(req, index=1).step(None, None, found)
    assert other.recommendation is None
    assert [event.code for event in other.events][-1] is EventCode.RECOMMENDATION
