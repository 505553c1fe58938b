"""Simulated devices: everything follows from the seed, and each kind has the structure that it says."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.replay.ground_truth import GroundTruth
from benchmarks.replay.runs import run_search
from benchmarks.simulated_tables import DEVICES, h200_report, simulate
from bexp.explorer.records.measurement import Outcome
from bexp.workers.replay.recording import Recording
from tests.workers.replay.samples import request


def table(kind: str, seed: int = 1, share: float = 1.0) -> Recording:
    asked = request()
    return simulate("small", asked, h200_report(asked.shapes), seed, whole_model_share=share, kind=kind)


@pytest.mark.parametrize("kind", sorted(DEVICES))
def test_a_table_follows_from_its_seed_and_its_runs_differ(kind: str) -> None:
    first, second, other = table(kind), table(kind), table(kind, seed=2)
    assert first.components == second.components
    assert first.whole_models == second.whole_models
    assert first.components != other.components
    for rows in first.components.values():
        assert len({row.figures.device_seconds for row in rows if row.figures}) == len(rows) > 4


@pytest.mark.parametrize("kind", sorted(DEVICES))
def test_every_candidate_that_fits_is_timed_whole_and_the_search_ends_near_the_best(kind: str) -> None:
    recorded = table(kind)
    truth = GroundTruth.of(kind, recorded)
    well = [rows for rows in recorded.whole_models.values() if rows[0].outcome is Outcome.OK]
    assert len(well) == truth.num_whole_models >= int((truth.tokens_C > 0).sum())
    assert np.median([run_search(truth, seed).regret for seed in range(3)]) < 0.03


def test_curves_of_different_kinds_differ() -> None:
    seconds = []
    for kind in sorted(DEVICES):
        recorded = table(kind, share=0.0)
        seconds.append([rows[0].figures.device_seconds for rows in recorded.components.values() if rows[0].figures])
    logs = np.log(np.array(seconds))
    assert all(np.std(logs[i] - logs[j]) > 0.05 for i in range(len(logs)) for j in range(i))
