"""What is held against what, of trainings over two devices."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from benchmarks.two_devices import ShardedCommand, judge


def test_an_answer_is_judged_by_the_sweep_around_it() -> None:
    tune = {"micro_batch_size": 8, "tokens_per_second": 10_240.0, "counts_tokens": True, "peak_bytes": 100}
    sweep: list[dict[str, Any]] = [
        {"micro_batch_size": 4, "samples_per_second": 8.0, "peak_bytes": 60},
        {"micro_batch_size": 8, "samples_per_second": 10.0, "peak_bytes": 100},
        {"micro_batch_size": 16, "samples_per_second": None, "peak_bytes": 0},
    ]
    found = judge(tune, sweep, 1024)
    assert (found["speed"], found["promised_speed"], found["promised_peak"]) == (0.0, 0.0, 0.0)
    assert (found["too_large"], found["off"]) == (True, [])
    faster = [*sweep[:2], {"micro_batch_size": 16, "samples_per_second": 11.0, "peak_bytes": 150}]
    assert judge(tune | {"peak_bytes": 90}, faster, 1024)["off"] == ["speed", "promised_peak"]
    assert judge(tune | {"tokens_per_second": 8.0, "counts_tokens": False}, sweep, 1024)["off"] == ["promised_speed"]
    assert judge(tune, [{"micro_batch_size": 8, "samples_per_second": None}], 1024)["off"] == ["out of memory"]


@pytest.mark.parametrize(("answer", "sizes"), [(8, [4, 8, 16]), (1, [1, 2]), (32, [16, 32])])
def test_a_sweep_runs_the_divisors_next_to_the_answer(
    answer: int, sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = argparse.Namespace(processes=2, tiny=True, device="cpu")
    command = ShardedCommand("loop", options, tmp_path)
    assert command._arguments("{micro_batch_size}", 2)[-2:] == ["--how", "loop"]
    monkeypatch.setattr(command, "run", lambda size, *, steps: {"micro_batch_size": size})
    assert [run["micro_batch_size"] for run in command.around(answer)] == sizes
