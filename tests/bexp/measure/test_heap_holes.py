"""A limited heap with holes, in a process of its own: what fits in memory runs, and what does not fits no better."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from bexp.measure.heap_holes import run_without_holes
from bexp.workers.process.environment import CPU_DEFAULTS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's data")

MIB = 1 << 20
LIMITED = f"""
import json, resource, sys
from bexp.measure import host_limits
from bexp.measure.heap_holes import run_without_holes
large, pieces = int(sys.argv[1]), int(sys.argv[2])
calls = []
host_limits.limit_data(300 * {MIB})
before = resource.getrlimit(resource.RLIMIT_DATA)

def run():
    calls.append(1)
    if len(calls) == 1:  # freed large tensors are holes; those kept between them fit in no older hole
        held = [(bytearray(32 * {MIB}), bytearray(2 * {MIB})) for _ in range(pieces)]
        run.kept = [small for _, small in held]
        del held
    return len(bytearray(large * {MIB}))

try:
    found = run_without_holes(run) // {MIB}
except MemoryError:
    found = None
print(json.dumps([found, len(calls), resource.getrlimit(resource.RLIMIT_DATA) == before]))
"""


def limited(large_mib: int, pieces: int) -> list[object]:
    """The mebibytes that a process with 300 could take, its runs, and whether its limit is what it was."""
    command = [sys.executable, "-c", LIMITED, str(large_mib), str(pieces)]
    done = subprocess.run(command, env=os.environ | CPU_DEFAULTS, capture_output=True, text=True, check=True)
    found: list[object] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("large_mib", "pieces", "found"),
    [(150, 0, [150, 1, True]), (150, 8, [150, 2, True]), (250, 5, [250, 2, True]), (900, 8, [None, 2, True])],
    ids=["no holes", "eight holes", "larger than all holes", "too large"],
)
def test_a_limit_counts_what_is_in_use(large_mib: int, pieces: int, found: list[object]) -> None:
    assert limited(large_mib, pieces) == found


def test_another_failure_is_not_tried_again() -> None:
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise ValueError("wrong shapes")

    with pytest.raises(ValueError, match="wrong shapes"):
        run_without_holes(fail)
    assert calls == [1]
