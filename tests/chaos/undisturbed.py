"""What a job must come to, however often its workers are killed: what one uninterrupted search comes to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from bexp.explorer.records.recommendation import Recommendation
from bexp.explorer.records.trial import Trial
from bexp.explorer.search.explore import explore
from bexp.explorer.spec.request import ExplorationRequest
from bexp.workers.replay.profiler import ReplayProfiler
from tests.chaos.processes import TABLE


@dataclass(frozen=True)
class Outcome:
    """The trials in their order, what is recommended, and with which confidence."""

    trials: tuple[str, ...]
    recommended: str | None = None
    confidence: int | None = None

    @classmethod
    def of(cls, trials: Iterable[Trial], best: Recommendation | None) -> Outcome:
        """Return what is compared of a search."""
        tried = tuple(f"{trial.kind} {trial.candidate.describe()}" for trial in trials)
        return cls(tried) if best is None else cls(tried, best.candidate.describe(), best.confidence)


class UndisturbedSearches:
    """Runs each request once, in this process, over the same recorded table as the workers."""

    def __init__(self) -> None:
        self._known: dict[str, Outcome] = {}

    def outcome_of(self, request: ExplorationRequest) -> Outcome:
        """Return the outcome of a request."""
        key = request.model_dump_json()
        if key not in self._known:
            self._known[key] = self._search(request)
        return self._known[key]

    @cached_property
    def _replay(self) -> ReplayProfiler:
        return ReplayProfiler(TABLE)

    def _search(self, request: ExplorationRequest) -> Outcome:
        replay = self._replay
        steps = explore(request, replay.begin(request), replay.measure, clock=replay.clock)
        trials: list[Trial] = []
        for step in steps:
            trials += [] if step.trial is None else [step.trial]
        assert step.answer is not None, "an exploration ends with an answer"
        return Outcome.of(trials, step.answer.recommendation)
