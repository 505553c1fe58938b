"""Which sizes the sweep of a training command runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tuned_commands import Command


@pytest.mark.parametrize(
    ("batch_size", "answer", "full_from", "sizes"),
    [(96, 24, 1000, [12, 16, 24, 32, 48, 96]), (96, 24, 48, [8, 12, 16, 24, 32, 48]), (10, 5, 1000, [2, 5, 10])],
)
def test_a_sweep_has_the_answer_and_the_divisors_of_the_batch_around_it(
    batch_size: int, answer: int, full_from: int, sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = Command("plain", batch_size, argparse.Namespace(), tmp_path)

    def run(size: int, *, steps: int) -> dict[str, Any]:
        return {"micro_batch_size": size, "samples_per_second": size / (size + 2) if size < full_from else None}

    monkeypatch.setattr(command, "run", run)
    runs = command.sweep(answer)
    assert [each["micro_batch_size"] for each in runs] == sizes
    assert runs[-1]["samples_per_second"] is not None or full_from < 1000
