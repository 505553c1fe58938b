"""What is expected of components that were not measured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bexp.explorer.cost.components import BlockRecompute, Component, ComponentKind
from bexp.explorer.records.measurement import ComponentMeasurement
from bexp.explorer.surrogate.gaussian_process import estimate_bytes, estimate_forward_shares, estimate_host_seconds
from bexp.explorer.surrogate.observations import ComponentObservations
from tests.explorer.search.small import candidate, small_state

SEEN, NEAR, KIND, OTHER = (
    Component(kind=ComponentKind.ATTENTION, micro_batch_size=1, backend="flash", num_query_groups=4),
    Component(kind=ComponentKind.ATTENTION, micro_batch_size=4, backend="flash", num_query_groups=4),
    Component(kind=ComponentKind.ATTENTION, micro_batch_size=4, backend="cudnn", num_query_groups=4),
    Component(kind=ComponentKind.HEAD, micro_batch_size=4),
)
COMPONENTS = (SEEN, NEAR, KIND, OTHER)


def observations(component: Component = SEEN, **changes: Any) -> dict[Component, ComponentObservations]:
    made = {
        "component": component,
        "device_seconds": 1.0,
        "host_seconds": 0.02,
        "forward_device_seconds": 0.4,
        "standard_error_seconds": 0.0,
        "repeats": 1,
        "saved_bytes": 150,
        "forward_peak_bytes": 300,
        "backward_peak_bytes": 50,
    }
    return {component: ComponentObservations((ComponentMeasurement.model_validate({**made, **changes}),))}


def host(found: dict[Component, ComponentObservations], device: float = 1.0) -> list[float]:
    predicted = np.array([0.01, 0.01, 0.03, 0.01])
    return [float(s) for s in estimate_host_seconds(COMPONENTS, predicted, np.full(4, device), found)[0]]


def test_host_seconds_follow_what_similar_components_took_over_their_prediction() -> None:
    assert host(observations()) == pytest.approx([0.02, 0.02, 0.06, 0.01])
    assert host({}) == pytest.approx([0.01, 0.01, 0.03, 0.01])


def test_host_seconds_that_nothing_similar_shows_are_at_most_the_devices() -> None:
    assert host(observations(), device=0.015) == pytest.approx([0.02, 0.02, 0.015, 0.01])
    assert host({}, device=0.002) == pytest.approx([0.002] * 4)


def test_a_block_that_waits_says_nothing_of_what_others_launch() -> None:
    waiting = observations(host_seconds=1.0)
    assert host(waiting) == pytest.approx([0.0, 0.0, 0.03, 0.01]), "one that is similar waits as well"
    launching = SEEN.model_copy(update={"micro_batch_size": 2, "backend": "cudnn"})
    predicted = np.array([0.01, 0.01, 0.03, 0.01, 0.01])
    found, _ = estimate_host_seconds(
        (*COMPONENTS, launching), predicted, np.full(5, 1.0), waiting | observations(launching, host_seconds=0.02)
    )
    assert found.tolist() == pytest.approx([0.0, 0.0, 0.06, 0.01, 0.02])


def test_host_seconds_are_less_certain_the_less_alike_components_are() -> None:
    _, std = estimate_host_seconds(COMPONENTS, np.full(4, 0.01), np.full(4, 1.0), observations())
    assert std == pytest.approx([0.1, 0.15, 0.3, 0.5])
    runs = observations()[SEEN].runs
    _, std = estimate_host_seconds(
        COMPONENTS, np.full(4, 0.01), np.full(4, 1.0), {SEEN: ComponentObservations(runs * 4)}
    )
    assert std[0] == pytest.approx(0.05)


def test_a_block_that_waits_has_no_host_seconds_of_its_own() -> None:
    assert host(observations(host_seconds=1.0))[0] == 0.0


def test_bytes_follow_similar_components_and_are_less_certain_the_less_alike_they_are() -> None:
    predicted = np.full((3, 4), 100.0)
    found, std = estimate_bytes(COMPONENTS, predicted, observations())
    assert found[:, 0].tolist() == [150, 300, 50]
    assert found[:, 1] == pytest.approx([150, 300, 50])
    assert found[:, 2] == pytest.approx([150, 200, 50]), "what is only of the same kind counts up to twice or half"
    assert found[:, 3].tolist() == [100, 100, 100]
    assert std == pytest.approx([0.0, 0.03, 0.10, 0.25])
    low, _ = estimate_bytes(COMPONENTS, predicted, observations(saved_bytes=10))
    assert low[0, 1:3] == pytest.approx([10, 50])


def test_nothing_measured_leaves_the_prediction() -> None:
    predicted = np.arange(12.0).reshape(3, 4)
    found, std = estimate_bytes(COMPONENTS, predicted, {})
    assert found.tolist() == predicted.tolist()
    assert std.tolist() == [0.25] * 4


def test_forward_passes_take_a_third_unless_measured_and_a_quarter_with_recomputation() -> None:
    table = small_state().table
    shares = estimate_forward_shares(table, {})
    for component, share in zip(table.components, shares, strict=True):
        assert share == (0.25 if component.recompute is BlockRecompute.FULL else pytest.approx(1 / 3))
    components = table.decompositions[table.row[candidate(1)]].components
    measured = next(c for c in components if c.kind is ComponentKind.ATTENTION)
    shares = estimate_forward_shares(table, observations(measured))
    for component, share in zip(table.components, shares, strict=True):
        alike = (component.kind, component.recompute) == (measured.kind, measured.recompute)
        assert share == pytest.approx(0.4) if alike else share < 0.34
