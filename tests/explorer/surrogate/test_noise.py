"""What the search does about noise, and about components that it can predict."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import pytest

from bexp.explorer.cost.components import Component
from bexp.explorer.cost.composition import Composition, required_table
from bexp.explorer.records.event import EventCode, Progress
from bexp.explorer.records.measurement import Measurement
from bexp.explorer.records.trial import Trial, TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.legal_space import enumerate_candidates
from tests.explorer.explorations import answer_of, lines, request, run, trials_of
from tests.explorer.simulator import SimulatedDevice, report


class NoisyDevice(SimulatedDevice):
    """Runs differ by `noise`, of which a run's own standard error says nothing; draws depend on the trial's number."""

    def __call__(self, task: TrialTask) -> Measurement:
        self.rng = np.random.default_rng([task.number, 7])
        found = super().__call__(task)
        quiet = tuple(
            c.model_copy(update={"standard_error_seconds": 0.001 * c.device_seconds}) for c in found.components
        )
        return found.model_copy(update={"components": quiet})


def again(device: SimulatedDevice) -> list[TrialTask]:
    return [plan for plan in device.plans if plan.again]


@cache
def noisy(noise: float = 0.2) -> tuple[NoisyDevice, tuple[Progress, ...]]:
    """A noisy device after an exploration without whole models, and the steps of it."""
    tiles = {"tiles": [1, 2, 3, 4, 6, 8, 12, 16]}
    device = NoisyDevice(request(verify=False, recompute=["none", "full"], bta=tiles), noise=noise)
    return device, tuple(run(device.request, device))


def test_a_noisy_device_is_measured_again_and_a_quiet_one_is_not() -> None:
    req = request()
    quiet = NoisyDevice(req, noise=0.001)
    found = answer_of(run(req, quiet)).recommendation
    assert not again(quiet)
    assert again(noisy()[0])
    assert found is not None
    assert found.confidence >= 95


def test_noise_that_repeats_cannot_overcome_lowers_the_confidence() -> None:
    less, more = (answer_of(list(noisy(noise)[1])).recommendation for noise in (0.2, 0.4))
    assert less is not None
    assert more is not None
    assert more.confidence < 80
    assert more.confidence < less.confidence


def test_no_component_is_run_more_often_than_tells_anything() -> None:
    device, steps = noisy(0.3)
    counts = Counter(c.key for plan in device.plans for c in plan.components)
    assert 2 <= max(counts.values()) <= 4
    assert all(set(plan.components) for plan in again(device))
    assert any("components again" in line for line in lines(list(steps), EventCode.TRIAL))


def test_confident_answers_on_a_noisy_device_are_right() -> None:
    confident = 0
    for seed in range(4):
        req = request(seed=seed, tolerance=0.03, verify=False)
        device = NoisyDevice(req, noise=0.03)
        found = answer_of(run(req, device)).recommendation
        assert found is not None
        candidates = enumerate_candidates(req, report(memory_gib=40), req.shapes).candidates
        table = Composition(candidates, req.shapes, req)
        truth = device.true_tokens_per_second(table)
        sizes = np.array([device.weigh(c, table.model) for c in table.components], dtype=float).T
        required = required_table(table, np.add(*table.activation_bytes(*sizes)), report(memory_gib=40).hardware)
        best = max(truth[required <= found.memory_limit_bytes])
        if found.confidence >= 90:
            confident += 1
            assert truth[table.row[found.candidate]] >= 0.96 * best
    assert confident >= 1


@pytest.mark.parametrize("stop_after", [4, 20])
def test_a_noisy_search_resumes_where_it_would_have_gone(stop_after: int) -> None:
    req, whole = noisy()[0].request, list(noisy()[1])
    assert any(len(plans) > 1 for plans in _runs(trials_of(whole)).values())
    before = whole[:stop_after]
    after = run(req, NoisyDevice(req, noise=0.2), history=trials_of(before))

    def told(trials: list[Trial]) -> list[tuple[object, ...]]:
        return [(t.number, t.candidate, t.measurement.components) for t in trials]

    assert told([*trials_of(before), *trials_of(after)]) == told(trials_of(whole))
    assert answer_of(after) == answer_of(whole)


def _runs(trials: list[Trial]) -> dict[Component, list[int]]:
    found: dict[Component, list[int]] = {}
    for trial in trials:
        for measured in trial.measurement.components:
            found.setdefault(measured.component, []).append(trial.number)
    return found


def wide() -> ExplorationRequest:
    return request(micro_batch_size={"explore": {"min": 1, "max": 256}}, memory_limit_gib=None)


@cache
def wide_run() -> tuple[SimulatedDevice, tuple[Progress, ...]]:
    """A device after an exploration of sizes up to 256, and the steps of it."""
    device = SimulatedDevice(wide(), noise=0.001)
    return device, tuple(run(device.request, device, rep=report(memory_gib=132)))


def test_the_recommended_candidate_is_measured_in_full() -> None:
    narrow = SimulatedDevice(request())
    explored = [(narrow, run(narrow.request, narrow, rep=report(memory_gib=132))), (wide_run()[0], list(wide_run()[1]))]
    for device, steps in explored:
        found = answer_of(steps).recommendation
        assert found is not None
        table = Composition([found.candidate], device.request.shapes, device.request)
        measured = {c for plan in device.plans for c in plan.components}
        assert set(table.components) <= measured
