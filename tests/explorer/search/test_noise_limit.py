"""A noisy device: the search says so and ends, the base is measured again, and whole models have a share."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import pytest

from bexp.explorer.records.event import EventCode, EventDraft, Progress
from bexp.explorer.records.measurement import Measurement
from bexp.explorer.records.trial import Trial, TrialKind, TrialTask
from bexp.explorer.search.explore import explore
from bexp.explorer.search.history import TrialHistory
from bexp.explorer.search.noise_limit import LIMITED_SHARE, NoiseLimit, noise_figures, reachable_confidence, shown_noise
from bexp.explorer.search.posterior import Posterior
from bexp.explorer.search.restored import LAST_RUNS, RUNS, BaseCandidate
from tests.explorer.explorations import answer_of, best_of, lines, trials_of
from tests.explorer.notes import notes_of
from tests.explorer.search.small import REPORT, candidate, know, measure, small_request, small_space, small_state, trial
from tests.explorer.simulator import SimulatedDevice

BUDGET = 200.0
ROW = 0


class NoisyDevice(SimulatedDevice):
    """Runs differ by `scatter`, of which their standard errors know nothing. Each takes a second of its clock."""

    def __init__(self, scatter: float, **asked: Any) -> None:
        super().__init__(small_request(budget={"max_seconds": BUDGET}, **asked), noise=0.0)
        self.scatter = scatter
        self.now = 0.0

    def __call__(self, task: TrialTask) -> Measurement:
        self.now += 1.0
        found = super().__call__(task)
        rng = np.random.default_rng(task.number)
        runs = [
            each.model_copy(update={"device_seconds": each.device_seconds * self._factor(rng)})
            for each in found.components
        ]
        whole = found.whole_model
        if whole is not None:
            whole = whole.model_copy(update={"micro_step_seconds": whole.micro_step_seconds * self._factor(rng)})
        return found.model_copy(update={"components": tuple(runs), "whole_model": whole})

    def _factor(self, rng: np.random.Generator) -> float:
        return math.exp(self.scatter * rng.standard_normal())


def run(device: NoisyDevice, history: tuple[Trial, ...] = ()) -> list[Progress]:
    steps = explore(
        device.request,
        REPORT,
        device,
        history=history,
        clock=lambda: device.now,
        prune=lambda *_: small_space(device.request),
    )
    return list(steps)


@cache
def noisy() -> tuple[Progress, ...]:
    return tuple(run(NoisyDevice(0.3)))


def noise_events(steps: tuple[Progress, ...]) -> list[EventDraft]:
    return [e for s in steps for e in s.events if "because of noise" in e.message]


def test_the_same_is_said_without_whole_models() -> None:
    steps = tuple(run(NoisyDevice(0.3, verify=False)))
    assert {t.kind for t in trials_of(list(steps))} == {TrialKind.COMPONENTS}
    assert len(noise_events(steps)) == 1


def test_a_quiet_search_goes_on_to_its_target() -> None:
    steps = tuple(run(NoisyDevice(0.002)))
    assert not noise_events(steps)
    found = best_of(steps)
    assert found.confidence >= 95
    assert found.run_noise is not None and found.run_noise < 0.02
    assert not any("differ by" in note for note in notes_of(found))
    assert answer_of(list(steps)).variants[0].completed_target == 95


def test_a_noisy_search_is_resumed_as_it_would_have_gone() -> None:
    trials = trials_of(list(noisy()))
    said = [e.message for s in noisy() for e in s.events if e.code >= EventCode.TRIAL]
    for stored in (2, len(trials) // 2, len(trials) - 1):
        device = NoisyDevice(0.3)
        steps = run(device, tuple(trials[:stored]))
        assert trials_of(steps) == trials[stored:]
        assert answer_of(steps) == answer_of(list(noisy()))
        again = [e.message for s in steps for e in s.events if e.code >= EventCode.TRIAL]
        assert again == said[len(said) - len(again) :]
    assert lines(list(noisy()), EventCode.WHOLE_MODEL)


SIZES = (192, 224, 256)


def scattered(scatter: float, runs: int = 3) -> Posterior:
    """A state of sizes that are about as fast, each of which was measured so often, with factors of `scatter` apart."""
    state = small_state(micro_batch_size=SIZES, attention_backends=["cudnn"], recompute=["none"])
    for size in SIZES:
        of = candidate(size)
        components = state.table.decompositions[state.table.row[of]].components
        for number in range(runs):
            factor = math.exp(scatter * (number - 1))
            state.knowledge.learn(100 * size + number, measure(state, components, of, scale=factor))
    return state


def test_more_runs_reach_more_and_noise_less() -> None:
    single = small_state()
    know(single, candidate(1), candidate(2), candidate(4))
    assert shown_noise(single, ROW) == 0.0, "no component was run twice"
    loud, quiet = scattered(0.3), scattered(0.001)
    assert shown_noise(loud, ROW) > 0.05
    assert shown_noise(quiet, ROW) < 0.01
    assert reachable_confidence(loud, 0.01, 1000.0) < 0.95 <= reachable_confidence(quiet, 0.01, 1000.0)
    assert reachable_confidence(loud, 0.01, 0.0) <= reachable_confidence(loud, 0.01, 1000.0)
    assert reachable_confidence(loud, 0.01, 1000.0) <= reachable_confidence(loud, 0.10, 1000.0)
    assert reachable_confidence(loud, 0.01, 0.0) == pytest.approx(loud.search_confidence, abs=0.1)


def test_the_limit_is_that_of_the_trials_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def limit(state: Posterior, seconds: float) -> NoiseLimit:
        return NoiseLimit(state, TrialHistory([trial(0, seconds=seconds)], state.request.budget, 1), 0)

    loud, quiet = scattered(0.3), scattered(0.001)
    assert limit(loud, 1.0).is_reached
    assert limit(loud, 1.0).ends_search, "the answer is surely within 5% of the best"
    monkeypatch.setattr("bexp.explorer.search.noise_limit.WIDER_TOLERANCE", 0.01)
    assert not limit(loud, 1.0).ends_search
    assert limit(loud, 600 * LIMITED_SHARE).ends_search
    history = TrialHistory([trial(0, seconds=1.0)], loud.request.budget, 1)
    later = NoiseLimit(loud, history, 0)
    assert not later.ends_search
    history.add(trial(1, seconds=600 * LIMITED_SHARE))
    assert later.ends_search, "a trial that taught nothing took its seconds, as a resumed search sees"
    assert not limit(quiet, 600 * LIMITED_SHARE).is_reached
    assert limit(loud, 1.0).outweighs_whole_models and not limit(quiet, 1.0).outweighs_whole_models
    assert not limit(small_state(), 1.0).is_reached, "nothing is known"
    best = loud.recommend()
    assert best is not None
    assert noise_figures(loud, best.row).confidences["0.01"] == math.floor(100 * best.confidence)


def test_each_of_several_variants_has_a_share_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bexp.explorer.search.noise_limit.WIDER_TOLERANCE", 0.01)
    state = scattered(0.3)

    def limit(first: float, second: float) -> NoiseLimit:
        trials = [trial(0, candidate(1, num_query_groups=1), seconds=first), trial(1, seconds=second)]
        return NoiseLimit(state, TrialHistory(trials, state.request.budget, 2), 1)

    assert not limit(200.0, 1.0).ends_search, "the second variant took a second"
    assert limit(200.0, 300 * LIMITED_SHARE).ends_search


def test_the_base_is_measured_again_where_its_runs_differ() -> None:
    base = candidate(SIZES[0])
    again = BaseCandidate(loud := scattered(0.3, runs=2), [base])
    assert again.known() == base
    assert again.again(base, RUNS) is None
    suggestion = again.again(base, LAST_RUNS)
    assert suggestion is not None and suggestion.again
    assert set(suggestion.components) < set(loud.table.decompositions[loud.table.row[base]].components)
    loud.knowledge.pending[900] = suggestion
    assert again.again(base, LAST_RUNS) is None, "it is in flight"
    quiet = BaseCandidate(scattered(0.001, runs=2), [base])
    assert quiet.again(base, LAST_RUNS) is None
