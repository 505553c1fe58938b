"""Who runs a trial together, and what they make of their numbers, over gloo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forked_ranks import run_ranks


@pytest.mark.slow(together="forked")
def test_ranks_find_their_rings_and_agree(tmp_path: Path) -> None:
    run_ranks("tests.workers.profiler.distributed.process_group_ranks", tmp_path)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    for rank, said in enumerate(found):
        assert said["largest"] == [3.0, 0.0]
        assert said["total"] == [6.0, 6.0, 6.0]
        assert said["ring"] == [[0, 1] if rank < 2 else [2, 3]]
        assert said["part"] == [True, rank < 3]
        assert said.get("three") == ([2.0] if rank < 3 else None)
        assert said.get("gradient") == ([1.0] if rank < 3 else None)
        assert said["eight"] == "the trial needs 8 devices; the profiler has 4"
