"""Failpoints: at an edge of a transaction of `bexp.storage`, a process is killed, frozen, or loses its connection.

The product has no hook for them. The processes of a campaign import a `Database.begin` with `CHANGE`; all others, the
campaign's own included, import the product's. An edge is a function that opens a transaction, and a place: `before`
it, `inside` when all is written and nothing is committed, or `after` the commit. It is armed by a file of its name in
a folder; the first process that passes it takes the file.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from random import Random

import sqlalchemy as sa

FOLDER = Path(__file__).parent / "interposed"

Change = tuple[str, str, str]
"""A module, a text that its source has once, and the text in its place."""

VARIABLE = "CHAOS_FAILPOINTS"
PLACES = ("before", "inside", "after")
ACTIONS = ("kill", "freeze", "lose")

OF_ADMINISTRATORS = {
    *("create_token", "revoke_token", "set_quota", "upgrade", "prune", "prune_audit", "prune_components"),
    *("try_write", "note_reason"),
}
"""Transactions of commands, of a schema's upgrade and of checks: no API and no worker of a campaign begins them."""
UNREACHED = {"_open", "_answer_from_stored", "end_overdue", "Queue.report_fault"}
"""Those for documents of other versions, for answers that are reused, after seven days, and for faults of a search."""

OF_JOBS = {"Queue." + name for name in ("finish", "heartbeat", "pin", "record", "release")}
OF_JOBS |= {"claim_next", "keep_components"}
"""Those of a worker that takes a job or has one."""
OF_CALLS = {"insert_submission", "Queue.request_cancel", "resume_job", "delete_job", "insert_run_report"}
"""Those that a client waits for."""

FREEZE_SECONDS = (2.2, 6.0)
"""Longer than a lease, and often so long that another worker has ended the job."""
FALLING_ASLEEP_SECONDS = 0.3
"""From the moment when a process takes an armed edge to its sleep, at most."""
ARMED_SECONDS = 20.0
"""So long an edge waits for a process that passes it, before others have their turn."""

_BODY = """        with self._take_turn(), self.engine.connect() as connection, connection.begin():
            yield connection
"""
CHANGE: Change = (
    "bexp.storage.database",
    _BODY,
    f"""        import sys
        from tests.chaos.failpoints import pass_edge
        edge = sys._getframe(2).f_code.co_qualname
        pass_edge(edge, "before")
{_BODY}            pass_edge(edge, "inside")
        pass_edge(edge, "after")
""",
)


_PARSING = threading.Lock()
"""CPython's parser may fail in a thread while another one parses: "AST constructor recursion depth mismatch"."""


def environment_with(changes: Sequence[Change], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process, and of its children, whose modules are changed as they are imported."""
    if not changes:
        return dict(environment)
    path = os.pathsep.join([str(FOLDER), *filter(None, [environment.get("PYTHONPATH")])])
    return {**environment, "PYTHONPATH": path, "CHAOS_CHANGES": json.dumps(changes)}


def list_edges() -> list[str]:
    """Return each edge that a campaign can reach, from the source of `storage`."""
    names = set[str]()
    for path in (Path(__file__).parents[2] / "storage").glob("*.py"):
        with _PARSING:
            module = ast.parse(path.read_text())
        _find_begins(module, (), names)
    names -= {"Database.begin", "Database.read", *OF_ADMINISTRATORS, *UNREACHED}
    return [f"{name}:{place}" for name, place in product(sorted(names), PLACES)]


def _find_begins(node: ast.AST, outer: tuple[str, ...], names: set[str]) -> None:
    for child in ast.iter_child_nodes(node):
        inner = (*outer, child.name) if isinstance(child, ast.FunctionDef | ast.ClassDef) else outer
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute) and child.func.attr == "begin":
            names.add(".".join(outer))
        _find_begins(child, inner, names)


def _num_turns(edge: str, action: str) -> int:
    """Return how often an edge is armed so where another one, as of a start, is armed once.

    A worker that is frozen within a transaction stops all of SQLite for seconds, and a frozen API all clients.
    """
    name, place = edge.split(":")
    if action == "freeze":
        return 3 if name in OF_JOBS and place != "inside" else 1
    return 3 if name in OF_JOBS | OF_CALLS else 1


def pass_edge(name: str, place: str) -> None:
    """Strike this process if the edge is armed."""
    armed = f"{os.environ[VARIABLE]}/{name}:{place}"
    try:
        action = Path(armed).read_text()  # before it is taken: then its owner may look at it and delete it
        Path(armed).rename(f"{armed}@{os.getpid()}")
    except FileNotFoundError:
        return
    if action == "lose":
        raise sa.exc.OperationalError("COMMIT", {}, ConnectionError(f"the connection was lost at {name}:{place}"))
    os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)


class Failpoints:
    """Arms edges in turn, and lets go on what was frozen long enough."""

    def __init__(self, folder: Path, rng: Random) -> None:
        folder.mkdir()
        self.struck: Counter[str] = Counter()
        """By edge and action."""
        self.frozen: list[tuple[int, float, float]] = []
        """The processes that were frozen, from when until when."""
        self._folder = folder
        self._rng = rng
        turns = [turn for turn in product(list_edges(), ACTIONS) for _ in range(_num_turns(*turn))]
        rng.shuffle(turns)
        self._turns = deque(turns)
        self._armed: dict[str, tuple[str, float]] = {}  # by edge: the action, and until when
        self.asleep: dict[int, float] = {}
        """The processes that are frozen now, until when."""

    def arm(self, number: int) -> None:
        """Arm the next edges, so many at once."""
        for _ in range(number):
            edge, action = self._turns[0]
            self._turns.rotate(-1)
            if edge not in self._armed:
                new = self._folder / "new"
                new.write_text(action)
                new.rename(self._folder / edge)
                self._armed[edge] = (action, time.time() + ARMED_SECONDS)

    def tend(self) -> None:
        """Note what was struck, disarm what waited for long, and wake up what slept for long enough."""
        now = time.time()
        for path in self._folder.glob("*@*"):
            edge, by = path.name.split("@")
            pid, (action, _) = int(by), self._armed.pop(edge)
            self.struck[f"{edge} {action}"] += 1
            if action == "freeze":
                seconds = self._rng.triangular(*FREEZE_SECONDS, FREEZE_SECONDS[0])
                self.asleep[pid] = now + seconds
                self.frozen.append((pid, path.stat().st_ctime, now + seconds))
            path.unlink()
        for edge, (_, armed_until) in list(self._armed.items()):
            if now >= armed_until:
                with suppress(FileNotFoundError):  # it strikes just now
                    (self._folder / edge).unlink()
                    del self._armed[edge]
        for pid, until in list(self.asleep.items()):
            if now >= until:
                del self.asleep[pid]
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def num_struck(self, names: Collection[str]) -> int:
        """Return how often the transactions of these names were struck."""
        return sum(number for name, number in self.struck.items() if name.split(":")[0] in names)

    def disarm(self) -> None:
        """Disarm all edges, at the next `tend`."""
        self._armed = {edge: (action, 0.0) for edge, (action, _) in self._armed.items()}

    def end(self) -> None:
        """Disarm all edges, and wake up what sleeps."""
        self.disarm()
        while self.asleep or self._armed:
            soon = time.time() + FALLING_ASLEEP_SECONDS
            self.asleep = {pid: min(until, soon) for pid, until in self.asleep.items()}
            self.tend()
            time.sleep(0.05)
