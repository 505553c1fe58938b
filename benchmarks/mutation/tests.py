"""Runs tests, and records which of them reach a line."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarks.mutation.mutants import Mutant
from benchmarks.mutation.processes import in_lanes, in_process

FOLDERS = ("explorer/search", "explorer/surrogate", "explorer/cost_model", "bexp/measure")
TESTS = tuple(f"tests/{folder}" for folder in FOLDERS)


@dataclass(frozen=True)
class Reached:
    """Which tests reach which lines of a file, and the seconds of each test."""

    seconds: dict[str, float]
    lines: dict[str, dict[int, list[str]]]

    def tests(self, mutant: Mutant, budget: float) -> list[str]:
        """The tests to run, the most promising first; none if no test reaches the statement."""
        lines = self.lines.get(mutant.path, {})
        first_line, last_line = mutant.lines
        wanted = lines if mutant.imported else range(first_line, last_line + 1)
        reaching = {test for line in wanted for test in lines.get(line, ())}
        own = f"/test_{Path(mutant.path).stem}.py"
        order = sorted(reaching, key=lambda test: (own not in test, self.seconds[test], test))
        chosen: list[str] = []
        spent = 0.0
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
    import pytest  # noqa: PLC0415 - in the process that is forked

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    plain = ("-p", "no:cacheprovider", "-p", "pytest_timeout", "--noconftest", "--rootdir", str(tree), *options)
    return int(pytest.main([*plain, *tests], plugins=[watch]))


def record_reached(tree: Path, name: str) -> dict[str, Any]:
    """Run this test file whole; tests that fail are left out."""
    import coverage  # noqa: PLC0415 - in the process that is forked

    tracer = coverage.Coverage(data_file=None, include=[f"{tree}/{folder}/*" for folder in FOLDERS], config_file=False)
    watch = Watch(tracer)
    tracer.start()
    run_tests(tree, [name], watch)
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


def find_reached(folder: Path, trees: Sequence[Path]) -> Reached:
    """What the tests reach. `folder` keeps it for each test file until that file or a source changes.

    Raises:
        RuntimeError: the tests of a file do not run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    test_files = sorted(file for tests in TESTS for file in (trees[0] / tests).glob("test_*.py"))
    sources = sha256(b"".join(file.read_bytes() for name in FOLDERS for file in sorted((trees[0] / name).glob("*.py"))))
    files: dict[str, str] = {}
    for file in test_files:
        digest = sources.copy()
        digest.update(file.read_bytes())
        files[str(file.relative_to(trees[0]))] = digest.hexdigest()[:16]
    kept = {name: folder / f"{Path(name).stem}-{digest}.json" for name, digest in files.items()}
    todo = [name for name in files if not kept[name].exists()]

    def work(lane: int, tree: Path) -> list[str]:
        for name in todo[lane :: len(trees)]:
            said = in_process(tree, partial(record_reached, tree, name))
            if isinstance(said, str):
                return [f"{name}: {said}"]
            kept[name].write_text(json.dumps(said))
        return []

    if problems := in_lanes(trees, work):
        raise RuntimeError(f"tests do not run: {problems}")
    reached = Reached({}, {})
    for path in kept.values():
        stored = json.loads(path.read_text())
        reached.seconds.update(stored["seconds"])
        for file, lines in stored["lines"].items():
            for line, tests in lines.items():
                reached.lines.setdefault(file, {}).setdefault(int(line), []).extend(tests)
        if stored["failed"]:
            print(f"failing, and left out: {stored['failed']}")
    return reached
