"""What a job's own measurements say of its noise, against noise that is known."""

from __future__ import annotations

import numpy as np
import pytest

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.records.measurement import ComponentMeasurement
from bexp.explorer.surrogate.hyperparameters import (
    AMPLITUDE_GRID,
    OWN_GRID,
    RUN_GRID,
    Covariance,
    Evidence,
    HyperparameterPosterior,
    Hyperparameters,
)
from bexp.explorer.surrogate.observations import ComponentObservations
from tests.explorer.measurements import measured

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
KIND = ComponentKind.DENSE_FFN


def component(size: int) -> Component:
    return Component(kind=KIND, micro_batch_size=size)


def measurement(size: int, seconds: float, error: float = 0.0005) -> ComponentMeasurement:
    return measured(component(size), seconds, host_seconds=1e-3, standard_error_seconds=error * seconds)


def evidence(*, own: float, run: float, runs: int, seed: int) -> Evidence:
    """Components whose real distance from the roofline is a line with a deviation, each measured a few times."""
    rng = np.random.default_rng(seed)
    seen = []
    for size in SIZES:
        true = 1e-3 * size * 1.5 * np.exp(own * rng.standard_normal())
        seen.append(
            ComponentObservations(
                tuple(measurement(size, true * np.exp(run * rng.standard_normal())) for _ in range(runs))
            )
        )
    kernel = Covariance.of([component(size) for size in SIZES])
    return Evidence.of(kernel, seen, np.log([1e-3 * size for size in SIZES]))


def learn(found: Evidence | None, device_kind: str = "cuda") -> Hyperparameters:
    posterior = HyperparameterPosterior(device_kind, [KIND.value], 256, np.random.default_rng(0))
    return posterior.draw({KIND.value: found} if found is not None else {})[KIND.value]


def typical(values: np.ndarray) -> float:
    return float(np.exp(np.log(values).mean()))


@pytest.mark.parametrize("run", [0.003, 0.02, 0.1, 0.3])
def test_repeated_runs_tell_the_noise_between_them(run: float) -> None:
    found = [typical(learn(evidence(own=0.01, run=run, runs=3, seed=seed)).run_N) for seed in range(5)]
    assert typical(np.array(found)) == pytest.approx(run, rel=0.5)


def test_repeated_runs_tell_noise_from_a_components_own_deviation() -> None:
    rough = [learn(evidence(own=0.05, run=0.005, runs=3, seed=seed)) for seed in range(5)]
    noisy = [learn(evidence(own=0.005, run=0.05, runs=3, seed=seed)) for seed in range(5)]
    assert all(typical(s.own_N) > 2 * typical(s.run_N) for s in rough)
    assert all(typical(s.run_N) > 1.5 * typical(s.own_N) for s in noisy)


def test_single_runs_show_the_sum_of_both() -> None:
    for seed in range(3):
        quiet = learn(evidence(own=0.002, run=0.002, runs=1, seed=seed))
        loud = learn(evidence(own=0.07, run=0.07, runs=1, seed=seed))
        total = [typical(np.hypot(s.own_N, s.run_N)) for s in (quiet, loud)]
        assert total[0] < 0.015
        assert total[1] > 0.05


def test_without_evidence_scales_follow_a_prior_that_knows_the_device() -> None:
    cuda, cpu = learn(None), learn(None, "cpu")
    assert typical(cuda.run_N) == pytest.approx(0.006, rel=0.3)
    assert typical(cpu.run_N) == pytest.approx(0.05, rel=0.3)
    assert {float(v) for v in cuda.run_N} <= {float(v) for v in RUN_GRID}
    assert len(np.unique(cuda.run_N)) > 5


def test_likelihood_is_that_of_the_runs_as_one_gaussian() -> None:
    """Mean and scatter of repeated runs together have the density of the runs themselves, up to a constant."""
    found = evidence(own=0.02, run=0.02, runs=1, seed=1)
    twice = Evidence(found.covariance, found.distance_L, found.number_L * 2, found.within_L, found.squares_L + 2e-4)
    first = found.distance_L + 0.01
    second = found.distance_L - 0.01
    values = np.concatenate([first, second])
    runs = twice.log_likelihood()
    direct = []
    cells = [(0, 0, 0), (4, 3, 1), (6, 5, 2), (9, 6, 3)]
    for i, j, k in cells:
        shared = found.covariance.level + AMPLITUDE_GRID[k] ** 2 * found.covariance.curve
        shared = shared + OWN_GRID[j] ** 2 * np.eye(len(SIZES))
        covariance = np.block([[shared, shared], [shared, shared]])
        covariance += np.diag(np.tile(RUN_GRID[i] ** 2 + found.within_L, 2))
        _, determinant = np.linalg.slogdet(covariance)
        direct.append(-0.5 * (determinant + values @ np.linalg.solve(covariance, values)))
    differences = [runs[cell] - value for cell, value in zip(cells, direct, strict=True)]
    assert np.ptp(differences) < 1e-4


def layer(part: str, size: int, backend: str = "sdpa") -> Component:
    return Component.model_validate({"kind": "layer", "part": part, "micro_batch_size": size, "backend": backend})


@pytest.mark.parametrize("times", [0.4, 1.0, 1.6, 3.0])
def test_layers_of_another_kind_that_are_slower_throughout_are_no_noise(times: float) -> None:
    """As where sliding windows need a mask, for which torch takes another kernel than for full attention."""
    kinds = {"full": 1.5, "sliding": 1.5 * times}
    layers = [layer(part, size) for size in (1, 2, 4, 8) for part in kinds]
    seconds = [1e-3 * each.micro_batch_size * kinds[each.part or ""] for each in layers]
    seen = [
        ComponentObservations((measured(each, taken, host_seconds=1e-3, standard_error_seconds=0.002 * taken),))
        for each, taken in zip(layers, seconds, strict=True)
    ]
    found = Evidence.of(Covariance.of(layers), seen, np.log([1e-3 * each.micro_batch_size for each in layers]))
    posterior = HyperparameterPosterior("cuda", ["layer"], 256, np.random.default_rng(0))
    drawn = posterior.draw({"layer": found})["layer"]
    assert typical(drawn.run_N) < 0.01
    assert typical(drawn.own_N) < 0.03
