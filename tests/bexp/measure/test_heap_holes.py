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
CASES = {
    "no holes": ((150, 0), [150, 1, True]),
    "eight holes": ((150, 8), [150, 2, True]),
    "larger than all holes": ((250, 5), [250, 2, True]),
    "too large": ((900, 8), [None, 2, True]),
}
"""The mebibytes of a bytearray and its runs with pieces; the mebibytes that it got, its runs, and whether the limit is
what it was."""
LIMITED = f"""
import json, os, resource, sys
from bexp.measure import host_limits
from bexp.measure.heap_holes import run_without_holes

def limited(large, pieces):
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
    return [found, len(calls), resource.getrlimit(resource.RLIMIT_DATA) == before]

for given in json.loads(sys.argv[1]):  # each in a process with a heap of its own, which need not import all again
    child = os.fork()
    if child == 0:
        print(json.dumps(limited(*given)), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def found() -> dict[str, object]:
    command = [sys.executable, "-c", LIMITED, json.dumps([given for given, _ in CASES.values()])]
    done = subprocess.run(command, env=os.environ | CPU_DEFAULTS, capture_output=True, text=True, check=True)
    return dict(zip(CASES, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_limit_counts_what_is_in_use(found: dict[str, object], case: str) -> None:
    assert found[case] == CASES[case][1]


def test_another_failure_is_not_tried_again() -> None:
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise ValueError("wrong shapes")

    with pytest.raises(ValueError, match="wrong shapes"):
        run_without_holes(fail)
    assert calls == [1]
