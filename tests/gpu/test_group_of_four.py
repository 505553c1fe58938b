"""A profiler of four CUDA devices; in a file of its own, since no other may hold one of them."""

from __future__ import annotations

from bexp.explorer.records.measurement import Outcome
from bexp.workers.process.profiler import Profiler
from tests.gpu.needs import visible
from tests.gpu.test_group import run
from tests.gpu.test_profiler import REQUEST

pytestmark = visible(4)


def test_trials_of_a_part_of_a_group_and_of_all_of_it() -> None:
    with Profiler(tuple(f"cuda:{i}" for i in range(4))) as four:
        for size in (2, 4, 2):
            four.begin(REQUEST)
            result = run(four, "zigzag", size=size)
            assert result.outcome is Outcome.OK, result.reason
            assert {m.contamination for m in result.components} == {None}
            assert all(m.conditions is not None and m.conditions.power_watts is not None for m in result.components)
