"""A pytest plugin that keeps each result as it comes, and spreads processes over GPUs: for `python -m tests.gpu`.

It does nothing in a pytest that was started otherwise, where the option is not given.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

OPTION = "--gpu-run"
MOST_LINES = 12
"""Lines of a failure's message that are printed."""
MOST_CHARACTERS = 4000
"""The part of a failure's message that is kept."""
FINAL = ("passed", "skipped", "failed")
BEGUN = "begun"


@dataclass(frozen=True)
class Plan:
    """What the processes of one phase are told.

    Results are added to the file `results`, one JSON object a line, with `code`, the state of the code. The tests that
    are to run are written to the file `found`: those in `only`, if it is not null, without those in `done`. A process
    sees one of `devices`, in turn. No test begins after `end`, in seconds since the epoch.
    """

    results: str
    found: str
    code: str
    end: float
    devices: list[str]
    done: list[str]
    only: list[str] | None = None

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Plan:
        return cls(**json.loads(path.read_text()))


def last_results(path: Path, code: str) -> dict[str, dict[str, Any]]:
    """Return the last line of each test that ran with this state of the code."""
    return {one["test"]: one for one in _lines(path) if one["code"] == code}


def last_failed(path: Path) -> list[str]:
    """Return the tests whose last result is a failure, whatever the state of the code was."""
    outcomes = {one["test"]: one["outcome"] for one in _lines(path) if one["outcome"] in FINAL}
    return [test for test, outcome in outcomes.items() if outcome == "failed"]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield each line of the results, without one that was cut off."""
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):
            yield json.loads(line)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, help="the plan of a run by `python -m tests.gpu`")


def pytest_configure(config: pytest.Config) -> None:
    given = config.getoption(OPTION)
    if given is None:
        return
    plan = Plan.read(Path(given))
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        config.pluginmanager.register(_Controller(plan, config))
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = plan.devices[int(worker.removeprefix("gw")) % len(plan.devices)]
    config.pluginmanager.register(_Worker(plan))


class _Worker:
    """Leaves out what is done, and begins nothing when the time is over."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._done = set(plan.done)
        self._only = None if plan.only is None else set(plan.only)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if self._is_asked(item.nodeid)]

    def _is_asked(self, test: str) -> bool:
        return test not in self._done and (self._only is None or test in self._only)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        return True if time.time() > self._plan.end else None


class _Controller:
    """Writes each result to the file and prints each failure, as they come."""

    def __init__(self, plan: Plan, config: pytest.Config) -> None:
        self._plan = plan
        self._config = config
        self._open: dict[str, dict[str, Any]] = {}
        self._unreadable: set[str] = set()

    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        Path(self._plan.found).write_text(json.dumps(ids))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and report.nodeid not in self._unreadable:  # each process tells of it
            self._unreadable.add(report.nodeid)
            last = str(report.longrepr).splitlines()[-MOST_LINES:]
            self._print(f"NOT READ {report.nodeid}", "\n".join(last))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._unreadable:
            session.exitstatus = pytest.ExitCode.INTERRUPTED

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write({"test": nodeid, "outcome": BEGUN})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        known = {"test": report.nodeid, "outcome": "passed", "seconds": 0.0}
        found = self._open.setdefault(report.nodeid, known)
        found["seconds"] = round(found["seconds"] + report.duration, 2)
        if report.failed and found["outcome"] != "failed":
            found |= {"outcome": "failed", "reason": _reason(report)[:MOST_CHARACTERS]}
            self._print(f"FAILED {report.nodeid} after {found['seconds']:.1f} s", found["reason"])
        elif report.skipped and found["outcome"] == "passed":
            found |= {"outcome": "skipped", "reason": _reason(report)}
        if report.when not in ("setup", "call"):  # the teardown, or the process ended in the middle
            self._write(self._open.pop(report.nodeid))

    def _write(self, line: dict[str, Any]) -> None:
        with Path(self._plan.results).open("a") as file:
            file.write(json.dumps(line | {"code": self._plan.code}) + "\n")

    def _print(self, title: str, reason: str) -> None:
        terminal: Any = self._config.pluginmanager.getplugin("terminalreporter")
        terminal.ensure_newline()
        terminal.write_line(title, flush=True, red=True)
        for line in reason.splitlines()[:MOST_LINES]:
            terminal.write_line(f"    {line}", flush=True)


def _reason(report: pytest.TestReport) -> str:
    """Return the error with its place, or why the test was skipped."""
    text: Any = report.longrepr
    if isinstance(text, tuple):
        return str(text[2])
    crash = getattr(text, "reprcrash", None)
    return str(text) if crash is None else f"{crash.path}:{crash.lineno}: {crash.message}"
