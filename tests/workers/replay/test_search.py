"""The search on recorded tables: the same seed and table give the same trials, whatever happens in between."""

from __future__ import annotations

import pytest

from bexp.explorer.records.trial import Trial
from bexp.explorer.search.explore import explore
from bexp.workers.replay.profiler import RecordedDevice, VirtualClock
from bexp.workers.replay.recording import Recording
from tests.workers.replay.samples import recording, request


def trials(
    recorded: Recording, seed: int, history: tuple[Trial, ...] = (), stop_after: int | None = None
) -> list[Trial]:
    """The trials of one lease; a device, a clock and a search of its own, as after a restart."""
    asked = request(seed=seed)
    clock = VirtualClock()
    device = RecordedDevice(recorded, seed=seed, clock=clock)
    found: list[Trial] = []
    for step in explore(asked, recorded.header.report, device, history=history, clock=clock):
        if step.trial is not None:
            # Differences of clock readings are the same up to rounding.
            found.append(step.trial.model_copy(update={"seconds": round(step.trial.seconds, 9)}))
            if len(found) == stop_after:
                break
    return found


def test_same_seed_same_table_same_trials() -> None:
    recorded = recording(whole_model_share=1.0)
    assert trials(recorded, 5) == trials(recorded, 5)
    assert trials(recorded, 5) != trials(recorded, 6)


@pytest.mark.parametrize("killed_after", [1, 2, 4, 7])
def test_a_kill_and_a_resume_change_nothing(killed_after: int) -> None:
    recorded = recording(whole_model_share=1.0)
    whole = trials(recorded, 5)
    before = trials(recorded, 5, stop_after=killed_after)
    assert [*before, *trials(recorded, 5, history=tuple(before))] == whole


def test_a_search_is_charged_the_recorded_seconds() -> None:
    recorded = recording()
    found = trials(recorded, 0)
    assert sum(t.seconds for t in found) == pytest.approx(sum(t.measurement.phases.total for t in found))
    assert all(t.suggest_seconds == 0 for t in found)
