from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from bexp.measure import turns
from bexp.measure.turns import FEWEST_ROUNDS, MOST_LINKS, TurnsBudget, chained, time_in_turns
from tests.bexp.measure.fake_cuda import FakeCuda

CPU = torch.device("cpu")


def test_contenders_run_in_turns_and_the_hopeless_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    now = 0.0

    def run(name: str, seconds: float) -> None:
        nonlocal now
        order.append(name)
        now += seconds

    monkeypatch.setattr(turns, "time", SimpleNamespace(perf_counter=lambda: now))
    runs = {"a": lambda: run("a", 2e-3), "b": lambda: run("b", 3e-3), "slow": lambda: run("slow", 3e-2)}
    budget = TurnsBudget(rounds=4, chain_seconds=1e-3, hopeless=5.0)
    found = time_in_turns(runs, CPU, budget)
    assert {name: each.clock_seconds for name, each in found.items()} == pytest.approx(
        {"a": 2e-3, "b": 3e-3, "slow": 3e-2}
    )
    assert found["a"].device_seconds == found["a"].clock_seconds, "the CPU is the host"
    assert [found[name].in_turns for name in runs] == [True, True, False]
    assert [found[name].rounds for name in runs] == [4, 4, 1]
    assert order[-9] == "slow"
    rounds = [tuple(order[i : i + 2]) for i in range(len(order) - 8, len(order), 2)]
    assert set(rounds) == {("a", "b"), ("b", "a")}, "each runs once a round, not always first"
    assert not time_in_turns({}, CPU)


def test_a_chain_gives_every_call_its_gradients_and_its_own_operands() -> None:
    x, w = torch.randn(3, 4), torch.randn(5, 4).mT
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def multiply(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        seen.append((x, w))
        return x @ w

    run, links = chained(multiply, (x, w), torch.randn(3, 5))
    run()
    assert links == len(seen) == MOST_LINKS
    assert len({w.data_ptr() for _, w in seen}) == MOST_LINKS
    assert all(each.stride() == w.stride() for _, each in seen)
    assert all(torch.equal(a, x) and torch.equal(b, w) and a.requires_grad and b.requires_grad for a, b in seen)
    assert all(each.grad is None for pair in seen for each in pair), "nothing is accumulated"
    _, links = chained(multiply, (x, w), torch.randn(3, 5), most_bytes=1)
    assert links == 1


class Runs:
    """Runs on a fake device, each with what it takes the host to issue and the device to run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cuda = FakeCuda()
        monkeypatch.setattr(turns, "time", SimpleNamespace(perf_counter=self.cuda.perf_counter))
        monkeypatch.setattr(torch.cuda, "Event", self.cuda.event)
        monkeypatch.setattr(torch.cuda, "_sleep", self.cuda.sleep)
        monkeypatch.setattr(torch.cuda, "synchronize", self.cuda.synchronize)
        self.count: Counter[str] = Counter()

    def run(self, name: str, issue: float, device: float, *, waits: bool = False) -> None:
        self.count[name] += 1
        self.cuda.host += issue
        self.cuda.launch(device)
        if waits:
            self.cuda.synchronize()


def test_a_devices_own_time_is_told_apart_from_the_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Runs(monkeypatch)
    contenders = {
        "device": lambda: made.run("device", 1e-5, 1e-3),
        "host": lambda: made.run("host", 1e-4, 2e-5),
        "waits": lambda: made.run("waits", 1e-4, 3e-4, waits=True),
    }
    budget = TurnsBudget(rounds=6, chain_seconds=1e-2, hopeless=20.0)
    found = time_in_turns(contenders, torch.device("cuda"), budget)
    clock = {name: each.clock_seconds for name, each in found.items()}
    device = {name: each.device_seconds for name, each in found.items()}
    assert clock == pytest.approx({"device": 1e-3, "host": 1e-4, "waits": 4e-4}, rel=0.25)
    assert device == pytest.approx({"device": 1e-3, "host": 2e-5, "waits": clock["waits"]}, rel=1e-6)
    assert all(each.in_turns and each.rounds == 6 for each in found.values())
    assert made.cuda.slept[:2] == pytest.approx([2e-3, 2e-3]), "the clock of the device is measured first"
    sleeps = made.cuda.slept[2:]
    assert min(sleeps) > 1e-3, "the host stays ahead"
    assert len(sleeps) == 6 + 2 * 2, "the run that waits is tried twice, with a longer sleep, in two turns"
    assert max(sleeps) >= 4 * min(sleeps)


def test_rounds_end_when_their_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Runs(monkeypatch)
    budget = TurnsBudget(rounds=50, chain_seconds=1e-3, hopeless=5.0, most_seconds=0.05)
    (found,) = time_in_turns({"a": lambda: made.run("a", 1e-5, 1e-3)}, torch.device("cuda"), budget).values()
    assert FEWEST_ROUNDS <= found.rounds < 50
    none = TurnsBudget(rounds=50, chain_seconds=1e-3, hopeless=5.0, most_seconds=0.0)
    (found,) = time_in_turns({"a": lambda: made.run("a", 1e-5, 1e-3)}, torch.device("cuda"), none).values()
    assert found.rounds == FEWEST_ROUNDS
