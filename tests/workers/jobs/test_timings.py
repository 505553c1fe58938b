from __future__ import annotations

import pytest

from bexp.explorer.records.measurement import PhaseSeconds
from bexp.workers.jobs import runner as accounting
from bexp.workers.jobs.runner import PHASES, JobTimings


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


def test_phases_do_not_overlap_and_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(accounting, "time", clock)
    account = JobTimings(queued_seconds=3.0000014)
    with account.begin():
        clock.now += 2.0
    with account.spend("suggest"):
        clock.now += 3.0 + 10.0
        account.add_trial(10.0, PhaseSeconds(process_start=90.0, build=4.0, timed=5.0))
    with account.spend("storage"):
        clock.now += 1.0
    clock.now += 0.5
    timings = account.seconds()
    assert timings == {
        "queue": 3.000001,
        "process_start": 3.0,  # of the 90 s that the trial reports only one can have passed within it
        "build": 4.0,
        "warm_up": 0.0,
        "timed": 5.0,
        "messaging": 0.0,
        "suggest": 3.0,
        "storage": 1.0,
        "other": 0.5,
        "total": 16.5,
        "profiler_idle": 4.5,
    }
    assert sum(timings[name] for name in (*PHASES, "other")) == timings["total"]


def test_a_trial_beside_others_counts_for_the_time_that_it_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(accounting, "time", clock)
    account = JobTimings(queued_seconds=0.0)
    with account.spend("suggest"):
        clock.now += 4.0 + 0.5
        account.add_trial(4.0, PhaseSeconds(build=2.0, timed=6.0), beside_others=True)
        account.add_trial(0.0, PhaseSeconds(build=1.0, timed=7.0), beside_others=True)
        clock.now += 3.0
        account.add_trial(3.0, PhaseSeconds(build=0.5, timed=0.5, process_start=9.0), beside_others=True)
    timings = account.seconds()
    assert (timings["build"], timings["timed"], timings["suggest"], timings["total"]) == (1.5, 3.5, 0.5, 7.5)
    assert timings["process_start"] == 2.0


def test_a_trial_whose_own_clock_counts_more_than_was_waited_takes_nothing_from_another_phase(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(accounting, "time", clock)
    account = JobTimings(queued_seconds=0.0)
    clock.now += 1.0
    account.add_trial(2.0, PhaseSeconds(build=3.0, process_start=4.0))
    timings = account.seconds()
    assert (timings["process_start"], timings["other"], timings["profiler_idle"]) == (0.0, 0.0, 0.0)
    assert (timings["build"], timings["total"]) == (3.0, 1.0)
