from __future__ import annotations

import io
import json
import random
import sys
from collections.abc import Callable

import pytest

from explorer.search.step_exploration import StepDescription, StepResult, main, search_step

GIB = 1 << 30
SIZES = (1, 2, 4, 8, 16, 32, 64)


class Device:
    """Eight GiB of state, one of gradients, two a sequence; its runs differ by 0.5%."""

    def __init__(self, seconds: Callable[[int], float], *, fails: dict[int, str] | None = None) -> None:
        self.asked: list[int] = []
        self._seconds = seconds
        self._fails = fails or {}
        self._random = random.Random(1)

    def measure(self, size: int) -> StepResult:
        self.asked.append(size)
        if size in self._fails:
            return StepResult(micro_batch_size=size, outcome=self._fails[size], reason="told")
        seconds = tuple(self._seconds(size) * (1 + self._random.gauss(0, 0.005)) for _ in range(5))
        return StepResult(micro_batch_size=size, outcome="ok", seconds=seconds, peak_bytes=(9 + 2 * size) * GIB)

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


def test_where_nobody_counts_memory_it_is_found_out_by_trying() -> None:
    device = Device(flat, fails={16: "out_of_memory", 32: "out_of_memory", 64: "out_of_memory"})
    found = search_step(device.describe(counts_memory=False), device.measure)
    assert found.micro_batch_size == 8
    assert found.predicted_out == ()


def test_a_size_that_crashes_rules_no_larger_one_out() -> None:
    device = Device(flat, fails={8: "crashed"})
    found = search_step(device.describe(), device.measure)
    assert found.micro_batch_size == 32


def test_of_sizes_that_are_as_good_as_each_other_any_is_right() -> None:
    device = Device(lambda size: 0.02 * size)
    found = search_step(device.describe(counts_memory=False), device.measure)
    assert found.confidence is not None and found.confidence >= 90


def test_an_end_of_the_measurements_gives_the_answer_so_far() -> None:
    device = Device(flat)
    description = device.describe()
    found = search_step(description, lambda _: None)
    assert found.micro_batch_size == 1
    assert found.confidence is not None and found.confidence < 50
    failed = description.model_copy(update={"first": StepResult(micro_batch_size=1, outcome="crashed")})
    assert search_step(failed, lambda _: None).reason == "no size was measured"


def test_the_process_speaks_json_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.StringIO()
    monkeypatch.setattr(sys, "stdin", io.StringIO(Device(flat).describe().model_dump_json() + "\nnull\n"))
    monkeypatch.setattr(sys, "stdout", output)
    assert main() == 0
    asked, answer = map(json.loads, output.getvalue().splitlines())
    assert asked["measure"] in SIZES
    assert answer["answer"]["micro_batch_size"] == 1
