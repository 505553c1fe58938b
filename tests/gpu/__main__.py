"""Runs the tests that need a GPU, side by side over the GPUs there are: `make test-gpu`, or `python -m tests.gpu`.

Each failure is printed with its reason when it happens. Each result is added to a file at once, so a run that is cut
off loses nothing, and the next one goes on with the tests that have no result yet. A result counts for the state of
the code that it was found with.

Three phases follow each other: tests that share a GPU, several processes to each; tests marked `alone`, one process to
each GPU; and tests marked `several_gpus`, one process that sees all GPUs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bexp.workers.devices.discovery import visible_devices
from tests.gpu.results import FINAL, OPTION, Plan, last_failed, last_results

ROOT = Path(__file__).parents[2]
GRACE_SECONDS = 15.0
"""What tests that run when the time is over get to end, before they are killed."""
_ENDED_WELL = (0, 1, 5)
"""pytest's status if tests ran, passed or not, or if there was none to run."""
SOURCES = ("bexp", "explorer", "workers", "benchmarks", "tests")
PACKAGES = ("torch", "triton", "transformers")


@dataclass(frozen=True)
class Phase:
    """Tests that run at a time, chosen by their marks. Each process sees one of `devices`, in turn."""

    name: str
    marks: str
    num_processes: int
    devices: list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if all tests passed or were skipped, 1 if one failed, 2 if some have no result."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="*", default=["tests/gpu"], help="files or folders (default: tests/gpu)")
    parser.add_argument("--minutes", type=float, default=60.0, help="time for all of it (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=Path("gpu-tests.jsonl"), help="default: %(default)s")
    parser.add_argument("--processes", type=int, default=6, help="to each GPU, at first (default: %(default)s)")
    parser.add_argument("--test-seconds", type=float, default=300.0, help="limit of one test (default: %(default)s)")
    parser.add_argument("--failed", action="store_true", help="run those that failed last, and only those")
    parser.add_argument("--devices", help="as in CUDA_VISIBLE_DEVICES (default: all that are visible)")
    asked = parser.parse_args(arguments)
    end = time.time() + 60 * asked.minutes
    devices = _devices(asked.devices)
    if not devices:
        print("there is no CUDA device: every test would be skipped")
        return 2
    code = _code()
    known, failed = last_results(asked.results, code), last_failed(asked.results)
    done = [test for test, one in known.items() if one["outcome"] in FINAL]
    found: list[str] = []
    complete = True
    for phase in _phases(devices, asked.processes):
        print(f"== {phase.name}, {(end - time.time()) / 60:.1f} minutes left", flush=True)
        plan = Plan(str(asked.results.resolve()), "", code, end, phase.devices, done)
        tests, ended = _run(phase, replace(plan, done=[], only=failed) if asked.failed else plan, asked)
        found += tests
        complete &= ended
    return _summary(asked.results, code, found, complete)


def _devices(named: str | None) -> list[str]:
    """The GPUs, each by a name that CUDA_VISIBLE_DEVICES takes."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES") if named is None else named
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    return [str(number) for number, _ in enumerate(visible_devices(os.environ)[1:])]


def _phases(devices: list[str], num_processes: int) -> list[Phase]:
    one = "gpu and not several_gpus"
    phases = [
        Phase("tests that share a GPU", f"{one} and not alone", num_processes * len(devices), devices),
        Phase("tests that have a GPU alone", f"{one} and alone", len(devices), devices),
    ]
    if len(devices) > 1:
        return [*phases, Phase("tests that need several GPUs", "gpu and several_gpus", 1, [",".join(devices)])]
    print("tests that need several GPUs are left out, because there is one")
    return phases


def _run(phase: Phase, plan: Plan, asked: argparse.Namespace) -> tuple[list[str], bool]:
    """Run a phase to its end or the end of the time; return the tests that it was to run, and whether it ended well."""
    if time.time() >= plan.end:
        return [], False
    with tempfile.TemporaryDirectory(prefix="bexp-gpu-tests-") as folder:
        found, written = Path(folder) / "found.json", Path(folder) / "plan.json"
        replace(plan, found=str(found)).write(written)
        pytest = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "tests.gpu.results"]
        plugins = ["-p", "no:cacheprovider", "-p", "no:benchmark"]  # the second warns beside other processes
        options = [*plugins, "--no-header", "--no-summary", "--continue-on-collection-errors"]
        options += ["--timeout", str(asked.test_seconds)]
        spread = ["--numprocesses", str(phase.num_processes), "--dist", "worksteal", "-m", phase.marks]
        command = [*pytest, OPTION, str(written), *options, *spread, *asked.paths]
        # A pytest that is started by a process of another is none of that one's.
        own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
        with subprocess.Popen(command, cwd=ROOT, env=own, start_new_session=True) as process:
            try:
                process.wait(max(0.0, plan.end - time.time()) + GRACE_SECONDS)
            except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
                os.killpg(process.pid, signal.SIGKILL)
                if isinstance(error, KeyboardInterrupt):
                    raise
                print("\nthe time is over: the tests that were still running are killed")
        return json.loads(found.read_text()) if found.exists() else [], process.returncode in _ENDED_WELL


def _summary(results: Path, code: str, found: list[str], complete: bool) -> int:
    known = last_results(results, code)
    outcomes = Counter(one["outcome"] for one in known.values())
    print(f"== {results}: {', '.join(f'{outcomes[name]} {name}' for name in FINAL)}")
    failed = [test for test, one in known.items() if one["outcome"] == "failed"]
    for test in failed:
        print(f"failed: {test}: {(known[test]['reason'].splitlines() or [''])[0]}")
    cut_off = [test for test, one in known.items() if one["outcome"] not in FINAL]
    for test in cut_off:
        print(f"begun, and cut off: {test}")
    left = [test for test in found if test not in known]
    if left:
        print(f"not begun: {len(left)} tests")
    if left or cut_off or not complete:
        print("not all tests were run; the same command goes on with those that have no result")
        return 1 if failed else 2
    return 1 if failed else 0


def _code() -> str:
    """Name the state of the code and of what it runs on."""
    digest = hashlib.sha256("".join(f"{package} {_version(package)}, " for package in PACKAGES).encode())
    for path in sorted(path for source in SOURCES for path in (ROOT / source).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


if __name__ == "__main__":
    sys.exit(main())
