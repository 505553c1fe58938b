from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bexp.transformers.ranks import NUM_RANKS, WRAPPERS
from tests.forked_ranks import run_ranks


@pytest.mark.slow(together="forked")
def test_gradients_under_ddp_and_fully_shard_are_those_of_the_plain_model(tmp_path: Path) -> None:
    run_ranks("tests.bexp.transformers.ranks", tmp_path)
    for rank in range(NUM_RANKS):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found.keys() == set(WRAPPERS)
        assert max(found.values()) <= 5e-5, found
