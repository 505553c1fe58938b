"""The judgement of a campaign's history: each promise, kept and broken."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random

import pytest
import sqlalchemy as sa

from bexp.explorer.formats.request import parse_request
from bexp.explorer.records.event import EventCode
from bexp.storage.database import Database, open_database
from bexp.storage.jobs import get_job
from bexp.storage.queue import Queue
from bexp.storage.tables import labels
from bexp.workers.jobs.runner import JobEnd, run_job
from bexp.workers.replay.profiler import ReplayProfiler, mismatch
from bexp.workers.replay.recording import Recording
from tests.chaos import failpoints
from tests.chaos.campaign import difference_of
from tests.chaos.failpoints import (
    ACTIONS,
    CHANGE,
    OF_ADMINISTRATORS,
    OF_CALLS,
    OF_JOBS,
    PLACES,
    UNREACHED,
    Failpoints,
    environment_with,
    list_edges,
)
from tests.chaos.history import Call, History, Seen
from tests.chaos.invariants import GIVEN_UP, violations_of
from tests.chaos.processes import TABLE, TABLES
from tests.chaos.promises import Stored, broken_promises
from tests.chaos.rounds import read_rounds
from tests.chaos.searches import search_of, seeds_of
from tests.chaos.undisturbed import UndisturbedSearches
from tests.contracts.samples import make_worker

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


@pytest.fixture(scope="module")
def done(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with one exploration, which a worker has ended."""
    path = Path(shutil.copy(sqlite_template, tmp_path_factory.mktemp("done")))
    database = open_database(f"sqlite:///{path}")
    queue, profiler = Queue(database), ReplayProfiler(TABLE)
    queue.enqueue(parse_request(search_of(0, 24)))
    hardware = profiler.hardware()
    worker = make_worker("host-1-replay-ab", hardware.device_kind, fingerprint=hardware.fingerprint)
    claim = queue.claim(worker, description="a table")
    assert claim is not None
    assert run_job(claim, queue, profiler, stopping=threading.Event()) is JobEnd.SUCCEEDED
    database.dispose()
    return path


STORED_WRONGLY = {
    "": [],
    "a gap": ["DELETE FROM bexp_events WHERE seq = 2"],
    "not end once": [f"UPDATE bexp_events SET code = {int(EventCode.SUCCEEDED)} WHERE seq = 3"],
    "ends in another way": ["UPDATE bexp_events SET code = 404 WHERE seq = (SELECT max(seq) FROM bexp_events)"],
    "a healthy job failed": ["UPDATE bexp_jobs SET state = 'failed'"],
    "it was given up too early": [
        f"UPDATE bexp_jobs SET state = 'failed', error = '{GIVEN_UP}'",
        f"UPDATE bexp_events SET code = 403, message = 'Exploration failed: {GIVEN_UP}'"
        " WHERE seq = (SELECT max(seq) FROM bexp_events)",
    ],
    "a trial is missing": ["DELETE FROM bexp_trials WHERE number = 1"],
    "not the recommendation that was told": [
        "UPDATE bexp_recommendations SET confidence = 1 WHERE seq = (SELECT max(seq) FROM bexp_recommendations)"
    ],
    "a wrong text": ["UPDATE bexp_events SET message = message || '.' WHERE seq = 1"],
    "differs from the search": ["UPDATE bexp_events SET message = message || '.' WHERE code = 201"],
}


@pytest.mark.parametrize("told", STORED_WRONGLY)
def test_what_is_stored_wrongly_of_an_exploration_is_named(done: Path, tmp_path: Path, told: str) -> None:
    database = open_database(f"sqlite:///{shutil.copy(done, tmp_path)}")
    with database.begin() as connection:
        for statement in STORED_WRONGLY[told]:
            assert connection.exec_driver_sql(statement).rowcount > 0
        job_id = connection.exec_driver_sql("SELECT id FROM bexp_jobs").scalar_one()
    job = get_job(database, job_id)
    differs = difference_of(database, job, UndisturbedSearches())
    found = [*violations_of(database, job), *([f"it differs from the search: {differs}"] if differs else [])]
    database.dispose()
    assert [text for text in found if told in text] if told else found == []


def test_the_seeds_of_a_campaign_belong_to_many_tables() -> None:
    for table in TABLES:
        assert len(seeds_of([table])) > 3
        answers = [mismatch(parse_request(search_of(seeds_of([table])[0], 24)), Recording.read(one)) for one in TABLES]
        assert [TABLES[index] for index, reason in enumerate(answers) if reason is None] == [table]


PASS_EACH_EDGE = """\
import os, signal, sys
from pathlib import Path
from bexp.storage.database import DATABASE_TROUBLE, open_database
from bexp.storage.queue import Queue
from tests.contracts.samples import make_request
for name in sys.argv[2:]:
    place, action = name.split()
    edge = Path(os.environ["CHAOS_FAILPOINTS"], f"insert_submission:{place}")
    edge.write_text(action)
    child = os.fork()
    if not child:
        try:
            Queue(open_database(sys.argv[1])).enqueue(make_request(labels={"edge": name.replace(" ", "-")}))
        except DATABASE_TROUBLE:
            os._exit(7)
        os._exit(0)
    status = os.waitpid(child, os.WUNTRACED)[1]
    if os.WIFSTOPPED(status):
        os.kill(child, signal.SIGCONT)
        assert os.waitpid(child, 0)[1] == 0
    print(name, "freeze" if os.WIFSTOPPED(status) else {9: "kill", 7 << 8: "lose"}.get(status), edge.exists())
"""


def test_a_process_is_struck_at_each_edge_of_a_transaction(sqlite_database: Database, tmp_path: Path) -> None:
    edges = [f"{place} {action}" for place, action in product(PLACES, ACTIONS)]
    environment = environment_with([CHANGE], os.environ | {failpoints.VARIABLE: str(tmp_path)})
    command = [sys.executable, "-c", PASS_EACH_EDGE, sqlite_database.url, *edges]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{edge} {edge.split()[1]} False" for edge in edges]
    with sqlite_database.read() as connection:
        stored = set(connection.scalars(sa.select(labels.c.value)))
    frozen = {f"{place}-freeze" for place in PLACES}
    assert stored == {"after-kill", "after-lose"} | frozen, "before the commit nothing is stored, after it all"


def test_edges_are_armed_in_turn_and_several_at_once(tmp_path: Path) -> None:
    armed, sizes, points = set[tuple[str, str]](), set[int](), Failpoints(tmp_path / "points", Random(1))
    for _ in range(20 * len(list_edges())):
        points.arm(2)
        now = {(path.name, path.read_text()) for path in (tmp_path / "points").iterdir()}
        sizes.add(len(now))
        armed |= now
        points.disarm()
        points.tend()
    assert armed == set(product(list_edges(), ACTIONS))
    assert max(sizes) == 2


def test_each_transaction_has_edges_or_a_reason_why_not() -> None:
    edges = list_edges()
    assert {"Queue.record:before", "Queue.finish:inside", "insert_submission:after"} <= set(edges)
    names = {edge.split(":")[0] for edge in edges}
    assert not names & (OF_ADMINISTRATORS | UNREACHED)
    assert names >= OF_JOBS | OF_CALLS


def test_each_promise_of_the_page_names_a_test_that_is_there() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "operations.md").read_text()
    promises = page.split("## Promises")[1].split("\n## ")[0]
    rows = [line for line in promises.splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 20
    for row in rows:
        promise, way, names = (cell.strip() for cell in row.strip("|").split(" | "))
        assert promise and way
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", names)
        assert named, row
        for path, name in named:
            assert f"def {name}(" in (root / path).read_text(), row


@pytest.mark.parametrize("name", ["chaos-rounds.json", "fuzz.json"])
def test_a_result_of_code_that_has_changed_since_is_called_old(name: str) -> None:
    root = Path(__file__).parents[2]
    commit = read_rounds(root / "benchmarks" / "results" / name)[-1]["commit"]
    judged = ("api", "storage", "workers/jobs")
    command = ["git", "diff", "--quiet", commit, "HEAD", "--", *judged]
    told = subprocess.run(command, check=False, cwd=root, capture_output=True)
    if told.returncode not in {0, 1}:
        pytest.skip("there is no git here, or it does not have the commit, as in a shallow clone")
    assert (f"`{name}` is old" in (root / "docs" / "operations.md").read_text()) is bool(told.returncode)
