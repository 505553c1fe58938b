"""What a job must come to, however often its workers are killed: what one uninterrupted search comes to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from bexp.explorer.records.event import EventDraft
from bexp.explorer.records.recommendation import Recommendation
from bexp.explorer.records.trial import Trial
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.explore import explore
from bexp.workers.replay.profiler import ReplayProfiler
from tests.chaos.invariants import is_of_storage
from tests.chaos.searches import TABLE_OF

TIME_TAKEN = re.compile(r" in [0-9.]+ s(?=\))")
"""How long a trial took. It is the only thing in a text that differs from run to run."""


@dataclass(frozen=True)
class Outcome:
    """The trials in their order, the texts of the search's events, and the recommendation with all that it says."""

    trials: tuple[str, ...]
    texts: tuple[str, ...]
    recommended: Recommendation | None

    @classmethod
    def of(cls, trials: Iterable[Trial], events: Iterable[EventDraft], best: Recommendation | None) -> Outcome:
        """Return what is compared of a search. What storage itself tells, such as who claimed the job, is left out."""
        tried = tuple(f"{trial.kind} {trial.candidate.describe()}" for trial in trials)
        told = (f"{event.code} {event.message}" for event in events if not is_of_storage(event))
        return cls(tried, tuple(TIME_TAKEN.sub("", text) for text in told), best)

    def begins(self, other: Outcome) -> bool:
        """Whether a search that was stopped went the way of another one that was not."""
        same_trials = other.trials[: len(self.trials)] == self.trials
        return same_trials and other.texts[: len(self.texts)] == self.texts

    def differences(self, other: Outcome) -> Iterator[str]:
        """Return the first difference of each kind, for a person."""
        for mine, theirs in ((self.trials, other.trials), (self.texts, other.texts)):
            for first, second in zip_longest(mine, theirs, fillvalue="nothing"):
                if first != second:
                    yield f"{first!r} instead of {second!r}"
                    break
        if self.recommended != other.recommended:
            yield "another recommendation"


class UndisturbedSearches:
    """Runs each request once, in this process, over the recorded table of its seed, as the workers do."""

    def __init__(self) -> None:
        self._known: dict[str, Outcome] = {}
        self._replays: dict[Path, ReplayProfiler] = {}

    def outcome_of(self, request: ExplorationRequest) -> Outcome:
        """Return the outcome of a request."""
        request = request.model_copy(update={"labels": {}})  # they change nothing
        key = request.model_dump_json()
        if key not in self._known:
            self._known[key] = self._search(request)
        return self._known[key]

    def _search(self, request: ExplorationRequest) -> Outcome:
        table = TABLE_OF[request.seed]
        if table not in self._replays:
            self._replays[table] = ReplayProfiler(table)
        replay = self._replays[table]
        steps = explore(request, replay.begin(request), replay.measure, clock=replay.clock)
        trials: list[Trial] = []
        events: list[EventDraft] = []
        for step in steps:
            trials += [] if step.trial is None else [step.trial]
            events += step.events
        assert step.answer is not None, "an exploration ends with an answer"
        return Outcome.of(trials, events, step.answer.recommendation)
