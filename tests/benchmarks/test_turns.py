from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks import turns
from benchmarks.turns import TurnsBudget, time_in_turns
from tests.bexp.measure.fake_cuda import CYCLES_PER_SECOND, FakeCuda

CPU = torch.device("cpu")
CUDA = torch.device("cuda:1")
CLOCK_SLEEPS = [2_000_000 / CYCLES_PER_SECOND] * 2
"""By which the clock of the sleep is measured."""


def test_contenders_run_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    now = 0.0

    def run(name: str, seconds: float) -> None:
        nonlocal now
        order.append(name)
        now += seconds

    monkeypatch.setattr(turns, "time", SimpleNamespace(perf_counter=lambda: now))
    runs = {"a": lambda: run("a", 3e-2), "b": lambda: run("b", 4e-2)}
    found = time_in_turns(runs, CPU, TurnsBudget(rounds=4, chain_seconds=1e-3))
    assert {name: each.clock_seconds for name, each in found.items()} == pytest.approx({"a": 3e-2, "b": 4e-2})
    assert found["a"].device_seconds == found["a"].clock_seconds, "the CPU is the host"
    assert [found[name].rounds for name in runs] == [4, 4]
    rounds = [tuple(order[i : i + 2]) for i in range(len(order) - 8, len(order), 2)]
    assert set(rounds) == {("a", "b"), ("b", "a")}, "each runs once a round, not always first"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A device in place of torch's, whose clock is also the host's."""
    cuda = FakeCuda()
    monkeypatch.setattr(turns, "time", cuda)
    monkeypatch.setattr(torch.cuda, "Event", cuda.event)
    monkeypatch.setattr(torch.cuda, "synchronize", cuda.synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", cuda.sleep)
    return cuda


class Kernel:
    """A run that takes the host and the device known times; `hosts` are those of single runs, by number."""

    def __init__(
        self, cuda: FakeCuda, *, host: float, device: float, waits: bool = False, hosts: dict[int, float] | None = None
    ) -> None:
        self.count = 0
        self._cuda, self._host, self._device, self._waits = cuda, host, device, waits
        self._hosts = hosts or {}

    def __call__(self) -> None:
        self._cuda.host += self._hosts.get(self.count, self._host)
        self._cuda.launch(self._device)
        self.count += 1
        if self._waits:
            self._cuda.wait()


WARM_UP = 1 + 1 + 1 + 2
"""Runs before the first turn."""


def test_a_run_that_keeps_the_device_busy_is_queued_behind_another(cuda: FakeCuda) -> None:
    kernel = Kernel(cuda, host=2e-4, device=1e-3)
    found = time_in_turns({"busy": kernel}, CUDA, TurnsBudget(rounds=6, chain_seconds=3.5e-3))["busy"]
    assert cuda.slept == CLOCK_SLEEPS, "a device that sleeps would clock higher"
    assert found.device_seconds == pytest.approx(1e-3)
    assert found.clock_seconds == pytest.approx((3 * 1e-3 + 2e-4) / 3), "the first of three is issued to an idle device"
    assert found.rounds == 6
    assert kernel.count == WARM_UP + 6 * (3 + 1 + 3), "three in a row, then one that three are queued behind"


def test_a_run_that_the_host_limits_is_queued_while_the_device_sleeps(cuda: FakeCuda) -> None:
    kernel = Kernel(cuda, host=4e-4, device=1e-4)
    found = time_in_turns({"launch-bound": kernel}, CUDA, TurnsBudget(rounds=5))["launch-bound"]
    assert found.device_seconds == pytest.approx(1e-4)
    assert found.clock_seconds == pytest.approx((8 * 4e-4 + 1e-4) / 8)
    assert cuda.slept == pytest.approx([*CLOCK_SLEEPS, *[1.5 * 5 * 4e-4 + 1e-3] * 5]), "800 launches of 2.5 us at most"
    assert kernel.count == WARM_UP + 5 * (8 + 5)


def test_a_run_that_waits_for_the_device_has_one_time_and_is_no_longer_queued(cuda: FakeCuda) -> None:
    kernel = Kernel(cuda, host=3e-4, device=1e-4, waits=True)
    found = time_in_turns({"waits": kernel}, CUDA, TurnsBudget(rounds=6, chain_seconds=1e-3))["waits"]
    assert found.device_seconds == found.clock_seconds == pytest.approx(4e-4)
    assert found.device_error_seconds == found.clock_error_seconds
    sleep = 1.5 * 3 * 4e-4 + 1e-3
    assert cuda.slept == pytest.approx([*CLOCK_SLEEPS, sleep, 5 * sleep, sleep, 5 * sleep]), "in two turns, and longer"
    assert kernel.count == WARM_UP + 6 * 3 + 4 * 3


def test_a_run_that_is_blocked_in_one_turn_alone_does_not_count_as_waiting(cuda: FakeCuda) -> None:
    first = WARM_UP + 2
    late = dict.fromkeys((first, first + 2), 1e-1)
    found = time_in_turns(
        {"once": Kernel(cuda, host=4e-4, device=1e-4, hosts=late)}, CUDA, TurnsBudget(rounds=5, chain_seconds=1e-3)
    )["once"]
    assert len(cuda.slept) == 2 + 2 + 4
    assert found.device_seconds == pytest.approx(1e-4)


def test_after_the_most_seconds_the_fewest_rounds_have_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounds(most_seconds: float) -> int:
        cuda = FakeCuda()
        monkeypatch.setattr(turns, "time", cuda)
        run = Kernel(cuda, host=1.0, device=0.0)
        return time_in_turns({"slow": run}, CPU, TurnsBudget(rounds=9, most_seconds=most_seconds))["slow"].rounds

    assert [rounds(seconds) for seconds in (0.0, 5.5, 6.5, 8.5, 100.0)] == [5, 6, 7, 9, 9]


def test_figures_are_medians_with_errors_and_a_single_time_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    monkeypatch.setattr(turns, "time", cuda)
    slow = {WARM_UP + 1: 1.5, WARM_UP + 3: 1.25}
    kernel = Kernel(cuda, host=1.0, device=0.0, hosts=slow)
    found = time_in_turns({"a": kernel}, CPU, TurnsBudget(rounds=4))["a"]
    assert found.clock_seconds == 1.125
    assert found.clock_error_seconds == found.device_error_seconds > 0.1
    once = time_in_turns({"b": Kernel(cuda, host=4.0, device=0.0)}, CPU, TurnsBudget(rounds=1))["b"]
    assert (once.clock_seconds, once.device_seconds) == pytest.approx((4.0, 4.0))
    assert (once.clock_error_seconds, once.device_error_seconds, once.rounds) == (0.0, 0.0, 1)
