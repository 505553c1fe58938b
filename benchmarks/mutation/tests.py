"""Runs tests, and records which of them reach a line."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.mutation.mutants import Mutant
from benchmarks.mutation.processes import ROOT, in_lanes, in_process

FOLDERS = ("explorer/search", "explorer/surrogate", "explorer/cost_model", "bexp/measure")
TESTS = tuple(f"tests/{folder}" for folder in FOLDERS)


@dataclass(frozen=True)
class Reached:
    """Which tests reach which lines of a file, and the seconds of each test."""

    seconds: dict[str, float]
    lines: dict[str, dict[int, list[str]]]

    def tests(self, mutant: Mutant, budget: float, first: str | None) -> list[str]:
        """The tests to run, the most promising first; none if no test reaches the statement."""
        lines = self.lines.get(mutant.path, {})
        first_line, last_line = mutant.lines
        wanted = lines if mutant.imported else range(first_line, last_line + 1)
        found = {test for line in wanted for test in lines.get(line, ())}
        own = f"/test_{Path(mutant.path).stem}.py"
        order = sorted(found, key=lambda test: (test != first, own not in test, self.seconds[test], test))
        chosen, spent = [], 0.0
        for test in order:
            spent += self.seconds[test]
            if chosen and spent > budget:
                break
            chosen.append(test)
        return chosen


class Watch:
    """A pytest plugin: which test failed first, and, with `coverage`, what each test reaches."""

    def __init__(self, coverage: Any = None) -> None:
        self.failed: str | None = None
        self.seconds: dict[str, float] = defaultdict(float)
        self.bad: set[str] = set()
        self._coverage = coverage

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self._coverage is not None:
            self._coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.bad.add(report.nodeid)
            self.failed = self.failed or report.nodeid


def run_tests(tree: Path, tests: Sequence[str], watch: Watch, *options: str) -> int:
    import pytest  # noqa: PLC0415

    plain = ("-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(tree), *options)
    return int(pytest.main([*plain, *tests], plugins=[watch]))


def record_reached(tree: Path, files: Sequence[str]) -> dict[str, Any]:
    """Run these test files whole; tests that fail are left out."""
    import coverage  # noqa: PLC0415

    tracer = coverage.Coverage(data_file=None, include=[f"{tree}/{folder}/*" for folder in FOLDERS], config_file=False)
    watch = Watch(tracer)
    tracer.start()
    run_tests(tree, files, watch)
    tracer.stop()
    data = tracer.get_data()
    lines = {
        str(Path(file).relative_to(tree)): {
            line: [test for test in tests if test and test not in watch.bad]
            for line, tests in data.contexts_by_lineno(file).items()
        }
        for file in data.measured_files()
    }
    return {"seconds": watch.seconds, "lines": lines, "failed": sorted(watch.bad)}


def find_reached(path: Path, trees: Sequence[Path]) -> Reached:
    """What the tests reach: read from `path`, else recorded there."""
    if not path.exists():
        files = sorted(str(file.relative_to(ROOT)) for folder in TESTS for file in (ROOT / folder).glob("test_*.py"))
        parts = in_lanes(
            trees, lambda lane, tree: [in_process(tree, lambda: record_reached(tree, files[lane :: len(trees)]))]
        )
        if any(isinstance(part, str) for part in parts):
            raise RuntimeError(f"the tests do not run: {[part for part in parts if isinstance(part, str)]}")
        merged: dict[str, Any] = {"seconds": {}, "failed": [], "lines": defaultdict(lambda: defaultdict(list))}
        for part in parts:
            merged["seconds"].update(part["seconds"])
            merged["failed"] += part["failed"]
            for file, lines in part["lines"].items():
                for line, tests in lines.items():
                    merged["lines"][file][line] += tests
        path.write_text(json.dumps(merged))
    stored = json.loads(path.read_text())
    print(f"{len(stored['seconds'])} tests, {sum(stored['seconds'].values()):.0f} s, failing: {stored['failed']}")
    lines = {file: {int(line): tests for line, tests in found.items()} for file, found in stored["lines"].items()}
    return Reached(stored["seconds"], lines)
