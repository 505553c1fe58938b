"""Which sizes the sweep of a training command runs, and what its figures stand for."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import tuned_commands
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


def test_the_speed_of_a_run_is_that_of_an_epoch_in_which_few_widths_are_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(8, 129, 4000)
    monkeypatch.setattr(tuned_commands, "real_lengths", lambda longest: tuple(lengths))
    widths = lengths[:96].reshape(24, 4).max(axis=1)
    is_new = [width not in widths[:place] for place, width in enumerate(widths)]
    seconds = 0.1 + 1e-3 * 4 * widths + 2.0 * np.array(is_new)
    own = {
        "samples_per_second": 1.0,
        "positions": [int(4 * width) for width in widths],
        "micro_step_seconds": seconds.reshape(6, 4).tolist(),
    }
    command = Command("plain", 16, argparse.Namespace(tiny=True, processes=1), tmp_path)
    found = command._in_an_epoch(4, own)
    epoch = lengths.reshape(1000, 4).max(axis=1)
    expected = 0.1 + 1e-3 * 4 * epoch.mean() + 2.0 * len(np.unique(epoch)) / 1000
    assert found["samples_per_second"] == pytest.approx(4 / expected, rel=0.03)
    assert found["own_samples_per_second"] == 1.0
    assert 4 / seconds.mean() < 0.5 * found["samples_per_second"], "the few steps of a run meet more of them"
