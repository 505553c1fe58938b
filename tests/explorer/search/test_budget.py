"""`max_seconds` adds up trials: as much time passes with one in flight, and less with more."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from bexp.explorer.records.measurement import Measurement
from bexp.explorer.records.trial import Trial, TrialExecutor, TrialTask
from bexp.explorer.search.explore import explore
from tests.explorer.explorations import pruned, request
from tests.explorer.simulator import SimulatedDevice, report

MAX_SECONDS = 10


class OneSecondEach(TrialExecutor):
    """Devices on which every trial takes a second of a clock that nothing else moves."""

    def __init__(self, device: SimulatedDevice, capacity: int) -> None:
        self.now = 0.0
        self._device = device
        self._capacity = capacity
        self._in_flight: list[tuple[float, TrialTask]] = []

    @property
    def capacity(self) -> int:
        return self._capacity

    def submit(self, task: TrialTask) -> None:
        self._in_flight.append((self.now + 1.0, task))

    def wait(self) -> tuple[TrialTask, Measurement]:
        self.now, plan = self._in_flight.pop(0)
        return plan, self._device(plan)


@pytest.fixture(autouse=True)
def _no_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bexp.explorer.search.loop.MOST_COMPARISONS", 0)  # they may take more than the limit


def run(capacity: int, history: Sequence[Trial] = (), most: int | None = None) -> tuple[list[Trial], float]:
    """Explore until the limit, or for `most` trials: the trials, and the seconds that passed."""
    req = request(budget={"max_seconds": MAX_SECONDS, "confidence_target": 99}, verify=False)
    several = OneSecondEach(SimulatedDevice(req, noise=0.3), capacity)
    steps = explore(req, report(memory_gib=40), several, history=history, clock=lambda: several.now, prune=pruned)
    trials = (step.trial for step in steps if step.trial is not None)
    return list(itertools.islice(trials, most)), several.now


@pytest.mark.parametrize(("capacity", "most_elapsed"), [(1, MAX_SECONDS), (4, MAX_SECONDS / 2)])
def test_seconds_of_trials_in_flight_are_added_up(capacity: int, most_elapsed: float) -> None:
    trials, elapsed = run(capacity)
    spent = sum(trial.seconds for trial in trials)
    assert spent == len(trials)
    assert MAX_SECONDS <= spent < MAX_SECONDS + capacity, "what is in flight at the limit ends as it would have"
    assert elapsed <= most_elapsed


def test_what_an_earlier_lease_spent_counts() -> None:
    before, _ = run(1, most=7)
    after, elapsed = run(1, history=before)
    assert len(after) == elapsed == MAX_SECONDS - 7
