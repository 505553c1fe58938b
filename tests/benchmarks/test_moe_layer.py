from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytest
import torch

from benchmarks import moe_layer
from benchmarks.docs.results import load
from benchmarks.moe_layer import Bench
from bexp.measure.cuda_timing import CudaTimer

SECONDS = {
    "dense eager": 1.0,
    "dense compile": 0.8,
    "fast": 1.5,
    "slow": 9.0,
    "fast compile": 1.2,
    "fast recomputing": 1.6,
}


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is timed, on a device on which the time of a back end does not depend on the micro-batch."""
    names: list[str] = []

    def time_one(*, name: str, micro_batch_size: int, **_: Any) -> dict[str, Any]:
        names.append(f"{name} {micro_batch_size}")
        sizes = ("saved_bytes", "forward_peak_bytes", "backward_peak_bytes")
        others = ("device_seconds", "forward_device_seconds", "host_seconds", "expert_flops_per_second")
        return {"seconds": SECONDS.get(name, 1.6)} | dict.fromkeys(sizes, 1) | dict.fromkeys(others, 1.0)

    monkeypatch.setattr(moe_layer, "time_one", time_one)
    monkeypatch.setattr(moe_layer, "contenders", lambda model, device: ("fast", "slow"))
    return names


def _bench(rows: list[dict[str, Any]], deadline: float = math.inf) -> Bench:
    timer: CudaTimer = None  # type: ignore[assignment]  # a stand-in
    return Bench(timer, torch.device("cpu"), deadline, rows)


def test_rows_are_relative_to_the_faster_dense_and_the_hopeless_are_left(timed: list[str]) -> None:
    bench = _bench([])
    assert bench.measure("layer", 8, 2, (64, 4))
    assert timed == [
        *("dense eager 4", "fast 4", "slow 4"),
        *("dense eager 64", "dense compile 64", "fast 64", "fast compile 64", "fast recomputing 64"),
    ]
    relative = {(row["backend"], row["micro_batch_size"]): row["relative_to_dense"] for row in bench.rows}
    assert relative["fast", 4] == pytest.approx(1 / 1.5)
    assert relative["fast", 64] == pytest.approx(0.8 / 1.5)
    timed.clear()
    bench.measure("layer", 128, 2, (4,))
    assert timed == ["fast 4", "slow 4"], "a dense block is the same for any number of experts"
    assert not bench.left_out


def test_rows_of_an_earlier_start_are_not_timed_again(timed: list[str]) -> None:
    whole = _bench([])
    whole.measure("layer", 8, 2, (4, 64))
    rows = [dict(row) for row in whole.rows]
    lost = [row for row in rows if row["backend"] in {"dense compile", "fast compile"}]
    timed.clear()
    bench = _bench([row for row in rows if row not in lost])
    assert bench.measure("layer", 8, 2, (4, 64))
    assert timed == ["dense compile 64", "fast compile 64"]
    assert sorted(map(str, bench.rows)) == sorted(map(str, rows))
    assert not bench.measure("layer", 8, 2, (4, 64))


def test_what_there_is_no_time_for_is_named(timed: list[str]) -> None:
    whole = _bench([])
    whole.measure("layer", 8, 2, (4,))
    timed.clear()
    bench = _bench(whole.rows[:1], deadline=-1.0)
    assert not bench.measure("layer", 8, 2, (4,))
    assert [row["backend"] for row in bench.left_out] == ["fast", "slow"]
    assert not timed


def test_the_recorded_rows_are_kept(timed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = load("h200-moe-layer")["rows"]
    names = dict.fromkeys(row["backend"] for row in recorded if not row["backend"].endswith("compile"))
    for name in ("dense eager", "liger"):  # liger-kernel came later, and not to all of these rows
        names.pop(name)
    monkeypatch.setattr(moe_layer, "contenders", lambda model, device: tuple(names))
    bench = _bench(deepcopy(recorded))
    for num_experts, top_k in ((128, 1), (8, 2)):
        bench.measure("layer", num_experts, top_k, (1, 4, 16, 64))
    assert all(" recomputing " in name for name in timed), "rows of a kind that came later"
    assert bench.rows[: len(recorded)] == recorded
