"""Runs tests as other processors would compute: `python -m tests.processors --output FILE [TEST ...]`.

The order of a sum depends on what a processor can do and on the number of threads. The libraries can be kept to less
than this processor can do, and each setting runs with one thread and with two. The file has a result after each run, so
that the same command goes on where it was cut off. Where there are no other tests named, those of kernels, targets,
`tune` and recordings run, on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from benchmarks.environment import ROOT, describe_commit, describe_environment, write_results
from bexp.measure.host_limits import processor_name

TESTS = (
    *("tests/bexp/kernels", "tests/bexp/graphs", "tests/bexp/transformers", "tests/bexp/test_tune_*.py"),
    *("tests/workers/targets/reference", "tests/workers/targets/transformers", "tests/workers/replay"),
    *("tests/explorer/search/test_recorded_*.py", "tests/explorer/search/test_logs.py"),
    "tests/explorer/cost/test_recorded_costs.py",
)
THREADS = (1, 2)


@dataclass(frozen=True)
class Setting:
    """Variables that keep libraries to some instructions, and those that the processor must have."""

    variables: dict[str, str] = field(default_factory=dict)
    needs: frozenset[str] = frozenset()


BELOW_AVX512 = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
"""torch asks oneDNN whether attention in bfloat16 is packed, and its own code for less than AVX-512 then refuses to."""
LOWEST = {
    "aten default": {"ATEN_CPU_CAPABILITY": "default", **BELOW_AVX512},
    "onednn sse4.1": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    "mkl sse4.2": {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    "numpy lowest": {
        "NPY_DISABLE_CPU_FEATURES": " ".join(np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])),
        "OPENBLAS_CORETYPE": "Nehalem",
    },
}
SETTINGS = {
    "its own": Setting(),
    "aten avx2": Setting({"ATEN_CPU_CAPABILITY": "avx2", **BELOW_AVX512}, frozenset({"avx2", "fma"})),
    "aten avx512": Setting(
        {"ATEN_CPU_CAPABILITY": "avx512"}, frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma"})
    ),
    **{name: Setting(variables) for name, variables in LOWEST.items()},
    "all lowest": Setting({name: value for each in LOWEST.values() for name, value in each.items()}),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if no test failed under any setting, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.processors", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tests", nargs="*", default=TESTS, help="what pytest takes (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="a JSON file, begun or continued")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="default: all")
    parser.add_argument("--processes", type=int, help="of pytest (default: as many as have a core for each thread)")
    asked = parser.parse_args(arguments)
    flags = processor_flags()
    run_of: dict[str, Any] = {
        "commit": os.environ.get("BEXP_COMMIT") or describe_commit(),
        "processor": processor_name(),
        "flags": sorted(flags),
        "tests": list(asked.tests),
    }
    found: dict[str, Any] = {**run_of, "environment": describe_environment(), "runs": []}
    if asked.output.exists():
        found = json.loads(asked.output.read_text())
        if {name: found.get(name) for name in run_of} != run_of:
            parser.error(f"{asked.output} is of another commit, another processor or other tests")
    print(f"{run_of['processor']}, commit {run_of['commit']}")
    for name in asked.settings:
        for threads in THREADS:
            if any((run["setting"], run["threads"]) == (name, threads) for run in found["runs"]):
                continue
            row = {"setting": name, "threads": threads, "variables": SETTINGS[name].variables}
            lacks = sorted(SETTINGS[name].needs - flags)
            row |= {"left_out": f"not on this processor: {', '.join(lacks)}"} if lacks else run(asked, name, threads)
            found["runs"].append(row)
            write_results(asked.output, found)
            told = row.get("left_out") or f"{row['passed']} passed, {len(row['failed'])} failed, {row['seconds']:.0f} s"
            print("\n  ".join([f"{name}, {threads} threads: {told}", *row.get("failed", ())]), flush=True)
    return 1 if any(run.get("failed") for run in found["runs"]) else 0


def processor_flags() -> frozenset[str]:
    """What the processor can do, as the kernel names it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))


def run(asked: argparse.Namespace, setting: str, threads: int) -> dict[str, Any]:
    """Run the tests under a setting; return how many passed, and the names of those that failed."""
    number = str(threads)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        **{"OMP_NUM_THREADS": number, "MKL_NUM_THREADS": number, "OPENBLAS_NUM_THREADS": number},
        **{"OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""},
        **SETTINGS[setting].variables,
    }
    tests = [str(path) for test in asked.tests for path in (sorted(ROOT.glob(test)) if "*" in test else [test])]
    with tempfile.TemporaryDirectory(prefix="bexp-processors-") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--junitxml", str(report)]
        command += [option for name in ("cacheprovider", "benchmark", "randomly") for option in ("-p", f"no:{name}")]
        processes = asked.processes or len(os.sched_getaffinity(0)) // threads
        if processes > 1:
            command += ["--numprocesses", str(processes), "--dist", "worksteal"]
        begun = time.monotonic()
        done = subprocess.run([*command, "--tb=short", *tests], cwd=ROOT, env=environment, check=False)
        seconds = round(time.monotonic() - begun, 1)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    failed = [f"{case.get('classname')}::{case.get('name')}" for case in cases if _has(case, "failure", "error")]
    skipped = sum(_has(case, "skipped") for case in cases)
    passed = len(cases) - len(failed) - skipped
    if done.returncode not in {0, 1}:
        failed.append(f"pytest ended with {done.returncode}")
    return {"passed": passed, "failed": failed, "skipped": skipped, "seconds": seconds}


def _has(case: ElementTree.Element, *outcomes: str) -> bool:
    return any(case.find(outcome) is not None for outcome in outcomes)


if __name__ == "__main__":
    sys.exit(main())
