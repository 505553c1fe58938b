from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import cycle
from statistics import mean

import pytest

from bexp.explorer.records.measurement import Outcome, SizeResult
from bexp.explorer.search.step_exploration import StepAnswer, StepDescription, search_step

GIB = 1 << 30
SIZES = (1, 2, 4, 8, 16, 32, 64)


class Device:
    """Eight GiB of state, one of gradients, two a sequence; its runs differ by 0.5%."""

    def __init__(self, seconds: Callable[[int], float], *, fails: dict[int, str] | None = None) -> None:
        self.asked: list[int] = []
        self._seconds = seconds
        self._fails = fails or {}
        self._random = random.Random(1)

    def measure(self, size: int) -> SizeResult:
        self.asked.append(size)
        if size in self._fails:
            return SizeResult(size, Outcome(self._fails[size]), reason="told")
        seconds = tuple(self._seconds(size) * (1 + self._random.gauss(0, 0.005)) for _ in range(5))
        return SizeResult(size, Outcome.OK, seconds=seconds, peak_bytes=(9 + 2 * size) * GIB)

    def describe(self, *, counts_memory: bool = True) -> StepDescription:
        return StepDescription(
            device_kind="cuda",
            device_name="a device",
            memory_bytes=80 * GIB if counts_memory else 0,
            held_bytes=8 * GIB,
            gradient_bytes=GIB,
            num_parameters=GIB // 4,
            torch_version="2.11",
            sizes=SIZES,
            max_seconds=300.0,
            first=self.measure(SIZES[0]),
        )


def flat(size: int) -> float:
    return 0.008 + 0.002 * size


def test_sizes_that_cannot_fit_are_not_tried_and_the_best_of_the_others_is_recommended() -> None:
    device = Device(flat)
    found = search_step(device.describe(), device.measure)
    assert found.micro_batch_size == 32
    assert found.predicted_out == (64,)
    assert 64 not in device.asked
    assert found.confidence is not None and found.confidence >= 90
    assert found.sequences_per_second == pytest.approx(32 / flat(32), rel=0.01)


def test_of_sizes_that_are_as_good_as_each_other_any_is_right() -> None:
    device = Device(lambda size: 0.02 * size)
    found = search_step(device.describe(counts_memory=False), device.measure)
    assert found.confidence is not None and found.confidence >= 80


def test_an_end_of_the_measurements_gives_the_answer_so_far() -> None:
    device = Device(flat)
    description = device.describe()
    found = search_step(description, lambda _: None)
    assert found.micro_batch_size == 1
    assert found.confidence is not None and found.confidence < 50
    failed = replace(description, first=SizeResult(1, Outcome.CRASHED))
    assert search_step(failed, lambda _: None).reason == "no size was measured"


SLOW_START = {1: 1 / 14, 2: 1 / 15, 4: 1 / 17, 8: 8 / 66}
"""Seconds of a step that takes as long for one sequence as for four."""


class SharedDevice(Device):
    """Has no memory counter. Its measurements are slowed by the given factors, one after the other."""

    def __init__(self, slowdowns: Iterable[float], most: int) -> None:
        super().__init__(SLOW_START.__getitem__)
        self.rates: dict[int, list[float]] = {}
        self._slowdowns = cycle(slowdowns)
        self._most = most

    def measure(self, size: int) -> SizeResult:
        found, slowdown = super().measure(size), next(self._slowdowns)
        seconds = tuple(slowdown * each for each in found.seconds)
        self.rates.setdefault(size, []).append(size / mean(seconds))
        return replace(found, seconds=seconds)

    def ask(self, size: int) -> SizeResult | None:
        return self.measure(size) if len(self.asked) < self._most else None

    def explore(self) -> StepAnswer:
        description = self.describe(counts_memory=False)
        return search_step(replace(description, device_kind="cpu", sizes=tuple(SLOW_START)), self.ask)


def test_a_size_that_was_measured_once_is_recommended_with_the_speed_that_was_measured() -> None:
    device = SharedDevice([1.0], most=5)
    found = device.explore()
    assert found.micro_batch_size == 4
    assert found.sequences_per_second == pytest.approx(68, rel=0.02)
    assert found.confidence is not None and found.confidence < 97  # 3% better, measured once on a CPU


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("most", [5, 12, 100])
def test_where_timings_scatter_the_answer_is_what_was_measured_and_not_sure(seed: int, most: int) -> None:
    slowdowns = random.Random(seed).choices([1.0, 1.0, 1.4, 2.2], k=101)
    device = SharedDevice(slowdowns, most)
    found = device.explore()
    rates = {size: 1 / mean(1 / each for each in rates) for size, rates in device.rates.items()}
    assert found.micro_batch_size is not None and found.confidence is not None and found.scatter is not None
    assert found.sequences_per_second == pytest.approx(rates[found.micro_batch_size])
    assert rates[found.micro_batch_size] >= 0.97 * max(rates.values()) or found.confidence < 50
    assert found.confidence <= 90
    if most > 5:
        assert found.scatter > 0.15


def test_one_repeat_alone_and_no_peak_are_enough_for_a_first_answer() -> None:
    device = Device(flat)
    described = device.describe()
    alone = replace(described, first=SizeResult(1, Outcome.OK, seconds=(0.01,), peak_bytes=11 * GIB))
    found = search_step(alone, lambda _: None)
    assert (found.micro_batch_size, found.sequences_per_second, found.predicted_out) == (1, 100.0, (64,))
    uncounted = replace(described, sizes=(1, 2), first=SizeResult(1, Outcome.OK, seconds=(0.01,)))
    found = search_step(uncounted, device.measure)
    assert (found.micro_batch_size, found.confidence, device.asked) == (2, 99, [1, 2])


def test_too_many_sizes_and_too_large_ones_are_refused() -> None:
    described = Device(flat).describe()
    for sizes in (tuple(range(1, 66)), (1, 257)):
        with pytest.raises(ValueError, match=r"^it takes at most 64 sizes, up to 256$"):
            search_step(replace(described, sizes=sizes), lambda _: None)
    assert search_step(replace(described, sizes=(*range(1, 64), 256)), lambda _: None).micro_batch_size == 1
