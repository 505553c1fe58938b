from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bexp.measure import turns
from bexp.measure.turns import MOST_LINKS, TurnsBudget, chained, time_in_turns

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
