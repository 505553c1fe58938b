"""Ranks that train together take the steps of one process with all their data, however their state is sharded."""

from __future__ import annotations

import json

import pytest

from tests.forked_ranks import run_ranks
from tests.workers.profiler.parallel_ranks import CASES, NUM_RANKS, Case, name_of

pytestmark = pytest.mark.slow(together="forked")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[float]]]:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks("tests.workers.profiler.parallel_ranks", folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_ranks_take_the_steps_of_one_process(found: list[dict[str, list[float]]], case: Case) -> None:
    for said in found:
        apart, moved, relative = said[name_of(case)]
        assert moved > 1e-5, "the parameters have been stepped"
        if "bfloat16" in name_of(case):  # each micro-step's gradient is rounded, one process's and the mean's
            assert relative < 0.1
        else:
            assert apart < 1e-7
            assert relative < 1e-5
