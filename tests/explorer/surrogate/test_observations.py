"""All runs of a component."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.records.device_report import EarlierRun
from bexp.explorer.records.measurement import ComponentMeasurement
from bexp.explorer.surrogate.observations import ComponentObservations, age_run
from tests.explorer.measurements import measured

HEAD = Component(kind=ComponentKind.HEAD, micro_batch_size=2)


def run(device: float = 2.0, **changes: Any) -> ComponentMeasurement:
    made = {"host_seconds": 0.5, "forward_device_seconds": device / 4, "standard_error_seconds": 0.1}
    sizes = {"saved_bytes": 10, "forward_peak_bytes": 20, "backward_peak_bytes": 30}
    return measured(HEAD, device, **(made | sizes | changes))


def observe(*runs: ComponentMeasurement) -> ComponentObservations:
    return ComponentObservations(runs)


def test_times_are_averaged_as_logarithms() -> None:
    found = observe(run(1.0), run(4.0, host_seconds=2.0))
    assert np.exp(found.log_seconds) == pytest.approx(2.0)
    assert found.squared_deviations == pytest.approx(2 * np.log(2) ** 2)
    assert found.host_seconds == pytest.approx(1.0)
    assert found.first.device_seconds == 1.0
    assert found.component == HEAD


def test_the_stated_error_is_relative_and_averaged_as_a_variance() -> None:
    found = observe(run(1.0), run(2.0))
    assert found.variance_within == pytest.approx((0.1**2 + 0.05**2) / 2)


def test_shares_and_slowdowns_are_averaged_over_the_runs_that_state_them() -> None:
    found = observe(run(), run(forward_device_seconds=1.0, slowdown=0.2), run(slowdown=0.4))
    assert found.forward_share == pytest.approx((0.25 + 0.5 + 0.25) / 3)
    assert found.slowdown == pytest.approx(0.3)
    assert observe(run()).slowdown is None


def test_host_overhead_comes_from_runs_that_state_both_of_its_parts() -> None:
    found = observe(run(), run(host_seconds=0.2, host_once_seconds=0.1), run(host_seconds=0.4, host_once_seconds=0.3))
    assert found.host_overhead == pytest.approx((0.3, 0.2))
    assert observe(run()).host_overhead == (0.0, 0.0)


def test_a_block_waits_if_every_run_has_one_time() -> None:
    assert observe(run(host_seconds=2.0)).waits
    assert not observe(run(host_seconds=2.0), run()).waits


def test_bytes_are_the_most_that_any_run_took() -> None:
    found = observe(run(saved_bytes=11, forward_peak_bytes=1), run(forward_peak_bytes=21, backward_peak_bytes=5))
    assert found.sizes == (11, 21, 30)


@pytest.mark.parametrize(("kind", "day", "between"), [("cuda", 0.002, 0.004), ("cpu", 0.01, 0.03)])
def test_an_earlier_run_is_less_certain_by_its_device_and_its_age(kind: str, day: float, between: float) -> None:
    made = run(2.0)
    for days in (0.0, 1.0, 9.0):
        aged = age_run(EarlierRun(measurement=made, age_seconds=86_400.0 * days), kind)
        drift = day * days**0.5
        expected = math.hypot(made.standard_error_seconds, 2.0 * math.hypot(between, drift))
        assert aged.standard_error_seconds == pytest.approx(expected)
        assert aged.device_seconds == 2.0
