"""What whole steps are known to do over sizes before they are measured."""

from __future__ import annotations

import numpy as np
import pytest

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.surrogate.step_shape import FALL, StepShape

SIZES = (1, 2, 4, 8, 16)


def step(size: int, backend: str = "first") -> Component:
    return Component.model_validate({"kind": ComponentKind.SHELL, "micro_batch_size": size, "backend": backend})


def shaped(seconds: dict[int, float], known: set[int]) -> dict[int, float]:
    logs = np.log([[seconds[size] for size in SIZES]])
    StepShape([step(size) for size in SIZES]).apply(logs, np.array([size in known for size in SIZES]))
    return dict(zip(SIZES, np.exp(logs[0]).tolist(), strict=True))


def test_what_is_measured_stays() -> None:
    seconds = {1: 9.0, 2: 1.0, 4: 5.0, 8: 2.0, 16: 3.0}
    assert shaped(seconds, set(SIZES)) == pytest.approx(seconds)
    assert shaped(seconds, set()) == pytest.approx(seconds), "nothing to compare with"


def test_seconds_grow_with_the_size() -> None:
    found = shaped({1: 9.0, 2: 1.0, 4: 0.5, 8: 20.0, 16: 4.0}, {2, 16})
    assert found[4] == pytest.approx(1.0)
    assert found[8] == pytest.approx(4.0)
    assert found[1] == pytest.approx(1.0)


def test_a_smaller_size_has_hardly_more_throughput_than_the_only_one_known() -> None:
    found = shaped({1: 0.01, 2: 0.1, 4: 0.2, 8: 2.0, 16: 4.0}, {16})
    for size in (1, 2, 4, 8):
        assert size / found[size] <= 16 / 4.0 * np.exp(FALL) * 1.000001
    assert found[8] == pytest.approx(2.0), "as fast as the larger one, which may be"
    assert found[1] > 0.25 * np.exp(-FALL), "as likely slower as it was too fast"


def test_two_sizes_show_a_fixed_part() -> None:
    found = shaped({1: 0.1, 2: 0.2, 4: 0.4, 8: 1.0 + 0.8, 16: 1.0 + 1.6}, {8, 16})
    for size in (1, 2, 4):
        assert found[size] >= (1.0 + 0.1 * size) * 0.999999


def test_a_fall_between_two_sizes_goes_on_for_one_octave() -> None:
    found = shaped({1: 0.01, 2: 0.02, 4: 0.25, 8: 1.0, 16: 3.0}, {8, 16})
    assert 4 / found[4] <= 8 * 1.5 * 1.000001, "by as much as from 8 to 16"
    assert 4 / found[4] > 8, "which two known sizes suggest"


def test_settings_are_curves_of_their_own_that_begin_at_the_largest_size_known_of_any() -> None:
    components = [step(size, backend) for backend in ("first", "second") for size in (4, 8)]
    logs = np.log([[2.0, 4.0, 0.1, 1.0]])
    StepShape(components).apply(logs, np.array([False, True, False, False]))
    assert np.exp(logs[0, [1, 3]]) == pytest.approx([4.0, 1.0])
    assert np.exp(logs[0, 2]) >= 0.5 * np.exp(-FALL) * 0.999999
