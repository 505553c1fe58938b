"""What sharded training state is predicted to take is what torch holds of it."""

from __future__ import annotations

import json

import pytest

from bexp.explorer.cost.step import gathered_bytes, static_parts
from tests.forked_ranks import run_ranks
from tests.workers.profiler.sharded_memory_ranks import CASES, Case, name_of, request_of

pytestmark = pytest.mark.slow(together="forked")


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks("tests.workers.profiler.sharded_memory_ranks", folder)
    found: dict[str, int] = json.loads((folder / "peaks.json").read_text())
    return found


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_state_is_counted_as_it_is_held(peaks: dict[str, int], case: Case) -> None:
    request = request_of(case)
    predicted = static_parts(request.shapes, request).total + gathered_bytes(request.shapes, request).at_layer
    assert predicted == pytest.approx(peaks[name_of(case)], rel=0.05)
