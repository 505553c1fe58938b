"""What the search does about noise, and about components that it can predict."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np

from bexp.explorer.cost.composition import Composition, required_table
from bexp.explorer.records.event import EventCode, Progress
from bexp.explorer.records.measurement import Measurement
from bexp.explorer.records.trial import TrialTask
from bexp.explorer.search.legal_space import enumerate_candidates
from tests.explorer.explorations import answer_of, best_of, lines, request, run
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
    device, steps = noisy()
    counts = Counter(c.key for plan in device.plans for c in plan.components)
    assert 2 <= max(counts.values()) <= 4
    assert all(set(plan.components) for plan in again(device))
    assert any("components again" in line for line in lines(list(steps), EventCode.TRIAL))


def test_confident_answers_on_a_noisy_device_are_right() -> None:
    confident = 0
    for seed in range(4):
        req = request(seed=seed, tolerance=0.03, verify=False)
        device = NoisyDevice(req, noise=0.03)
        found = best_of(run(req, device))
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
