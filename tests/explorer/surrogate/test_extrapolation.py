"""What is expected of components that were not measured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.surrogate.gaussian_process import estimate_bytes, estimate_host_seconds
from bexp.explorer.surrogate.observations import ComponentObservations
from tests.explorer.measurements import measured

SEEN, NEAR, KIND, OTHER = (
    Component(kind=ComponentKind.ATTENTION, micro_batch_size=1, backend="flash", num_query_groups=4),
    Component(kind=ComponentKind.ATTENTION, micro_batch_size=4, backend="flash", num_query_groups=4),
    Component(kind=ComponentKind.ATTENTION, micro_batch_size=4, backend="cudnn", num_query_groups=4),
    Component(kind=ComponentKind.HEAD, micro_batch_size=4),
)
COMPONENTS = (SEEN, NEAR, KIND, OTHER)


def observations(component: Component = SEEN, **changes: Any) -> dict[Component, ComponentObservations]:
    made = {"host_seconds": 0.02, "saved_bytes": 150, "forward_peak_bytes": 300, "backward_peak_bytes": 50}
    return {component: ComponentObservations((measured(component, **(made | changes)),))}


def host(found: dict[Component, ComponentObservations], device: float = 1.0) -> list[float]:
    predicted = np.array([0.01, 0.01, 0.03, 0.01])
    return [float(s) for s in estimate_host_seconds(COMPONENTS, predicted, np.full(4, device), found)[0]]


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
