"""The posterior of the components' seconds against the closed form of the same Gaussian process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from bexp.explorer.cost.collectives import ASSUMED_SLOWDOWN
from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.cost.composition import Composition, predict_component_table
from bexp.explorer.cost.roofline import predict_component_seconds
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.records.measurement import ComponentMeasurement
from bexp.explorer.surrogate.gaussian_process import Surrogate
from bexp.explorer.surrogate.hyperparameters import Covariance, Hyperparameters
from bexp.explorer.surrogate.observations import ComponentObservations
from tests.explorer.cost.tiny import hardware, model_of, request
from tests.explorer.measurements import measured

NUM_SAMPLES = 20_000
RUN, OWN, AMPLITUDE = 0.03, 0.02, 0.1


def make_table(*, communicates: bool = False, **changes: Any) -> Composition:
    candidates = [
        Candidate(micro_batch_size=size, attention_backend=backend, num_query_groups=1)
        for size in (1, 2, 4)
        for backend in ("flash", "math")
    ]
    req = request(**changes)
    return Composition(candidates, model_of(req), req, communicates=communicates)


class Fixed:
    """Hyperparameters that are the same in every sample, whatever is measured."""

    def draw(self, evidence: Mapping[str, object]) -> dict[str, Hyperparameters]:
        values = (np.full(NUM_SAMPLES, value) for value in (RUN, OWN, AMPLITUDE))
        same = Hyperparameters(*values)
        return {kind.value: same for kind in ComponentKind}


def make_surrogate(table: Composition, kind: Any = "cuda", *, fixed: bool = False) -> Surrogate:
    number = NUM_SAMPLES if fixed else 64
    made = Surrogate(table, hardware(kind), num_samples=number, rng=np.random.default_rng(0))
    if fixed:
        made._hyperparameter_posterior = Fixed()  # type: ignore[assignment]  # a stand-in
        made.fit({})
    return made


def roofline(table: Composition, component: Component) -> float:
    return predict_component_seconds(component, table.model, table.request, hardware()).device


def run(component: Component, seconds: float, error: float = 0.0, **changes: Any) -> ComponentMeasurement:
    made = {"host_seconds": 1e-9, "forward_device_seconds": seconds / 4, "standard_error_seconds": error * seconds}
    sizes = {"saved_bytes": 100, "forward_peak_bytes": 200, "backward_peak_bytes": 300}
    return measured(component, seconds, **(made | sizes | changes))


def observed(*runs: ComponentMeasurement) -> dict[Component, ComponentObservations]:
    found: dict[Component, list[ComponentMeasurement]] = {}
    for each in runs:
        found.setdefault(each.component, []).append(each)
    return {component: ComponentObservations(tuple(all_of)) for component, all_of in found.items()}


def of_kind(table: Composition, kind: ComponentKind) -> list[Component]:
    return [c for c in table.components if c.kind is kind]


def test_before_anything_is_measured_the_mean_is_the_roofline() -> None:
    table = make_table()
    made = make_surrogate(table)
    assert made.device_mean_K == pytest.approx([roofline(table, c) for c in table.components])
    assert made.bytes_3K == pytest.approx(predict_component_table(table))
    assert np.array_equal(made.predicted_bytes_3K, made.bytes_3K)
    assert not made.known_K.any()
    assert made.overlap is None


def test_the_posterior_is_that_of_the_closed_form() -> None:
    table = make_table()
    made = make_surrogate(table, fixed=True)
    attention = of_kind(table, ComponentKind.ATTENTION)
    first, second = attention[0], attention[3]
    assert first.backend != second.backend
    distances = {first: [0.3, 0.4], second: [-0.2]}
    made.fit(
        observed(
            *(
                run(component, roofline(table, component) * float(np.exp(distance)), error=0.04)
                for component, found in distances.items()
                for distance in found
            )
        )
    )
    prior = Covariance.of(attention)
    covariance = prior.level + AMPLITUDE**2 * prior.curve + OWN**2 * np.eye(len(attention))
    rows = [0, 3]
    noise = np.diag([(RUN**2 + 0.04**2) / 2, RUN**2 + 0.04**2])
    gain = covariance[:, rows] @ np.linalg.inv(covariance[np.ix_(rows, rows)] + noise)
    mean = gain @ np.array([0.35, -0.2])
    std = np.sqrt(np.diag(covariance - gain @ covariance[rows]))
    columns = [table.column[c] for c in attention]
    base = np.log([roofline(table, c) for c in attention])
    assert np.log(made.device_mean_K[columns]) - base == pytest.approx(mean, abs=1e-6)
    assert made.log_center_K[columns] - base == pytest.approx(mean, abs=0.01)
    assert made.log_std_K[columns] == pytest.approx(std, rel=0.03)
    assert np.log(made.device_NK).mean(axis=0)[columns] == pytest.approx(made.log_center_K[columns])
    others = [k for k, c in enumerate(table.components) if c.kind is not ComponentKind.ATTENTION]
    assert made.device_mean_K[others] == pytest.approx([roofline(table, table.components[k]) for k in others])


def test_what_no_other_component_predicts_must_be_measured() -> None:
    table = make_table(communicates=True, num_devices=2)
    essential = make_surrogate(table).essential_K
    kinds = {c.kind for c, is_essential in zip(table.components, essential, strict=True) if is_essential}
    assert kinds == {ComponentKind.OPTIMIZER, ComponentKind.COMMUNICATION}


def test_a_trial_in_flight_makes_its_component_surer_and_moves_no_mean() -> None:
    table = make_table()
    made = make_surrogate(table, fixed=True)
    head, *_, other = of_kind(table, ComponentKind.HEAD)
    made.fit(observed(run(other, 2 * roofline(table, other))))
    mean, std = made.device_mean_K.copy(), made.log_std_K.copy()
    expecting = made.expecting([head])
    column = table.column[head]
    assert expecting.known_K[column]
    assert not made.known_K[column]
    assert expecting.device_mean_K == pytest.approx(mean)
    assert expecting.log_std_K[column] < 0.05 < std[column]
    assert np.array_equal(made.log_std_K, std)
    assert expecting.hyperparameters is made.hyperparameters
    assert expecting.bytes_3K[:, column] == pytest.approx(np.round(made.bytes_3K[:, column]))
    assert expecting.host_K[column] == pytest.approx(made.host_K[column])


def test_a_component_that_is_run_again_keeps_its_earlier_runs() -> None:
    table = make_table()
    made = make_surrogate(table, fixed=True)
    head = of_kind(table, ComponentKind.HEAD)[0]
    column = table.column[head]
    made.fit(observed(run(head, 1e-3)))
    once, twice = made.log_std_K[column], made.expecting([head]).log_std_K[column]
    assert once == pytest.approx(RUN, rel=0.05)
    assert twice == pytest.approx(RUN / np.sqrt(2), rel=0.05)


def test_the_noise_of_a_step_takes_the_median_of_each_kind() -> None:
    table = make_table()
    made = make_surrogate(table)
    values, blank = np.full(64, 0.001), np.zeros(64)
    values[:7] = 1000.0
    made.hyperparameters = {kind.value: Hyperparameters(values, blank, blank) for kind in ComponentKind}
    assert made.step_run_std(table, np.array([0]))[0] <= 0.001


def test_overlap_is_assumed_until_the_exchange_is_measured() -> None:
    table = make_table(communicates=True, num_devices=2, training={"sharding": "zero2"})
    made = make_surrogate(table)
    (communication,) = table.communications
    column = table.column[communication]
    assert made.overlap is not None
    assert made.overlap.slowdown_K[column] == ASSUMED_SLOWDOWN
    assert made.overlap.host_overhead_2K[:, column].tolist() == [0.0, 0.0]
    assert made.overlap.forward_share_K[column] == 0.5
    assert not made.overlap.computes
    made.fit(observed(run(communication, 0.01, slowdown=0.7, host_seconds=0.002, host_once_seconds=0.003)))
    assert made.overlap.slowdown_K[column] == 0.7
    assert made.overlap.host_overhead_2K[:, column].tolist() == [0.002, 0.003]
    assert made.overlap.forward_share_K[column] == 0.25
    others = [k for k in range(len(table.components)) if k != column]
    assert not made.overlap.slowdown_K[others].any()
