"""The judgement of a campaign's history: each promise, kept and broken."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.failpoints import CHANGE, OF_ADMINISTRATORS, OF_CALLS, OF_JOBS, UNREACHED, list_edges
from tests.chaos.history import Call, History, Seen
from tests.chaos.interposition import environment_with
from tests.chaos.promises import Stored, broken_promises

QUEUED = Seen("j", "red", "queued", False, {"key": "k"}, 1, "as queued")
DONE = replace(QUEUED, state="succeeded", content="as done")
CANCELLED = replace(QUEUED, state="cancelled", cancel_requested=True)
STORED = Stored("j", "red", "succeeded", "k", 0.0, 5.0, (7,))
SUBMIT = Call("submit", "red", None, "k", 1, 0.0, 1.0, 202, seen=QUEUED)


def call(operation: str, at: float, status: int | None, seen: Seen | None = None, number: int = 0) -> Call:
    return Call(operation, "red", "j", None, number, at, at + 0.5, status, seen=seen)


def judge(*calls: Call, stored: tuple[Stored, ...] = (STORED,), is_disturbed: bool = False) -> list[str]:
    by_id = {one.id: one for one in stored}
    return broken_promises(History([SUBMIT, *calls]), by_id, lambda *_: is_disturbed)


OTHER = replace(STORED, id="other", created=2.0)
AGAIN = replace(SUBMIT, started=3.0, ended=3.5)
CANCEL = call("cancel", 2.0, 202, replace(QUEUED, state="running", cancel_requested=True))
UNANSWERED = replace(AGAIN, status=None)
STILL_THERE = replace(STORED, state="cancelled", finished=2.5)
LIST = replace(call("list", 4.0, 200), job_id=None, key="k", listed=frozenset({"j"}))

KEPT: dict[str, Callable[[], list[str]]] = {
    "a key that was used again": lambda: judge(AGAIN),
    "a key with another request": lambda: judge(replace(AGAIN, number=2, status=422, seen=None)),
    "a key that is free again": lambda: judge(call("cancel", 1.5, 200, CANCELLED), stored=(STILL_THERE, OTHER)),
    "a cancel, and an end": lambda: judge(CANCEL, call("get", 4.0, 200, CANCELLED), stored=(STILL_THERE,)),
    "a cancel, and a resumption": lambda: judge(CANCEL, call("resume", 3.0, 202, QUEUED), call("get", 4.0, 200, DONE)),
    "a deletion": lambda: judge(call("delete", 6.0, 204), call("get", 7.0, 404), stored=()),
    "a run report": lambda: judge(call("report", 6.0, 201, number=7)),
    "no answer from an API that was killed": lambda: judge(UNANSWERED, is_disturbed=True),
    "a list": lambda: judge(LIST),
    "a list with one whose submission had no answer": lambda: judge(
        replace(LIST, listed=frozenset({"j", "lost"})), replace(call("prune", 5.0, 204), job_id="lost")
    ),
}

BROKEN: dict[str, tuple[str, Callable[[], list[str]]]] = {
    "a second job of a key": ("made two explorations", lambda: judge(stored=(STORED, OTHER))),
    "another job at once": (
        "made two explorations",
        lambda: judge(replace(AGAIN, seen=replace(QUEUED, id="other")), stored=(STORED, OTHER)),
    ),
    "another request's job": ("with another request", lambda: judge(replace(AGAIN, number=2))),
    "a refused key": ("for no other request", lambda: judge(replace(AGAIN, status=422, seen=None))),
    "a cancel that is forgotten": ("was lost", lambda: judge(CANCEL, call("get", 4.0, 200, QUEUED))),
    "a success after a cancel": ("after its cancel", lambda: judge(CANCEL, stored=(replace(STORED, finished=30.0),))),
    "a lost job": ("not stored", lambda: judge(stored=())),
    "a job that is gone": ("nobody has deleted it", lambda: judge(call("get", 4.0, 404))),
    "a job that is back": ("was deleted", lambda: judge(call("delete", 6.0, 204))),
    "a changed answer": (
        "changed after",
        lambda: judge(call("get", 6.0, 200, DONE), call("get", 7.0, 200, replace(DONE, content="as changed"))),
    ),
    "an end that is undone": (
        "it had succeeded",
        lambda: judge(call("get", 6.0, 200, DONE), call("cancel", 7.0, 200, CANCELLED)),
    ),
    "a lost run report": ("stored 0 times", lambda: judge(call("report", 6.0, 201, number=8))),
    "no answer": ("no answer within", lambda: judge(UNANSWERED)),
    "a late answer": ("no answer within", lambda: judge(replace(AGAIN, ended=20.0))),
    "a server error": ("unexpected answer", lambda: judge(call("get", 6.0, 500))),
    "another owner's job": ("unexpected answer", lambda: judge(call("peek", 6.0, 200, QUEUED))),
    "a list with one of another label": (
        "of another label or owner",
        lambda: judge(replace(LIST, listed=frozenset({"j", "other"})), stored=(STORED, replace(OTHER, key="l"))),
    ),
    "a list that lacks it": ("not in the list", lambda: judge(replace(LIST, listed=frozenset()))),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_promise_that_was_kept_is_no_violation(name: str) -> None:
    assert KEPT[name]() == []


@pytest.mark.parametrize("name", BROKEN)
def test_a_promise_that_was_broken_is_named(name: str) -> None:
    text, find = BROKEN[name]
    assert [violation for violation in find() if text in violation]


def test_the_failpoints_still_fit_the_source() -> None:
    module, old, new = CHANGE
    path = Path(__file__).parents[2] / f"{module.removeprefix('bexp.').replace('.', '/')}.py"
    assert path.read_text().count(old) == 1, f"{module} has changed: {old}"
    assert old != new


def test_each_transaction_has_edges_or_a_reason_why_not() -> None:
    edges = list_edges()
    assert {"Queue.record:before", "Queue.finish:inside", "insert_submission:after"} <= set(edges)
    names = {edge.split(":")[0] for edge in edges}
    assert not names & (OF_ADMINISTRATORS | UNREACHED)
    assert names >= OF_JOBS | OF_CALLS


def test_a_process_imports_a_module_with_its_change() -> None:
    change = ("bexp.api.settings", "answer_seconds: float = 4.5", "answer_seconds: float = 60.0")
    told = "from bexp.api.settings import ServiceSettings as S; print(S('').answer_seconds)"
    seconds = [
        json.loads(
            subprocess.run([sys.executable, "-c", told], env=environment, capture_output=True, check=True).stdout
        )
        for environment in (dict(os.environ), environment_with([change], os.environ))
    ]
    assert seconds == [4.5, 60.0]


def test_each_promise_of_the_page_names_a_test_that_is_there() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "operations.md").read_text()
    promises = page.split("## Promises")[1].split("\n## ")[0]
    rows = [line for line in promises.splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 10
    for row in rows:
        path, name = re.findall(r"`([\w/]+\.py)::(test_\w+)`", row)[0]
        assert f"def {name}(" in (root / path).read_text(), row
