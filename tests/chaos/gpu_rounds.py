"""Rounds of device faults: what one did and found, the sum of many, and which kind comes next."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from tests.chaos.result import late_cancels, spread


@dataclass
class Round:
    """One job with one fault. `used_bytes` is what all processes hold of the device afterwards; null on the CPU.

    So many `lanes` ran jobs with faults on the device at the same time. A round that was judged wrongly is `dropped`,
    for a reason, and counts nowhere.
    """

    kind: str
    commit: str
    device: str
    seconds: float = 0.0
    struck: bool = False
    outcomes: dict[str, int] = field(default_factory=dict)
    cancel_seconds: float | None = None
    used_bytes: int | None = None
    lanes: int = 1
    dropped: str | None = None
    violations: list[str] = field(default_factory=list)


def add_up(rounds: Sequence[Round]) -> dict[str, object]:
    """Return all rounds as one JSON document."""
    dropped = Counter(f"{done.kind}: {done.dropped}" for done in rounds if done.dropped is not None)
    rounds = [done for done in rounds if done.dropped is None]
    cancels = [done.cancel_seconds for done in rounds if done.cancel_seconds is not None]
    violations = [f"{done.kind}: {text}" for done in rounds for text in done.violations]
    return {
        "commits": sorted({done.commit for done in rounds}),
        "devices": sorted({done.device for done in rounds}),
        "rounds": dict(sorted(Counter(done.kind for done in rounds).items())),
        "struck": dict(sorted(Counter(done.kind for done in rounds if done.struck).items())),
        "dropped": dict(sorted(dropped.items())),
        "seconds": round(sum(done.seconds for done in rounds), 1),
        "cancels": spread(cancels),
        "violations": violations + late_cancels(cancels),
    }


def append_round(path: Path, done: Round) -> None:
    """Add a round to a file; several processes may do so at once."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(done)) + "\n")


def read_rounds(path: Path) -> list[Round]:
    """Return the rounds of a file; none if there is no file."""
    known = {each.name for each in fields(Round)}
    lines = path.read_text().splitlines() if path.exists() else []
    return [Round(**{name: value for name, value in json.loads(line).items() if name in known}) for line in lines]


def next_kind(kinds: Sequence[str], rounds: Sequence[Round], num_rounds: int) -> str | None:
    """Return the kind that has struck least often, the first of equals; null once each has struck `num_rounds` times.

    A fault that does not strike, because its job took another way, is tried again, at most as often once more.
    """
    rounds = [done for done in rounds if done.dropped is None]
    tried = Counter(done.kind for done in rounds)
    struck = Counter(done.kind for done in rounds if done.struck)
    open_kinds = [kind for kind in kinds if struck[kind] < num_rounds and tried[kind] < 2 * num_rounds]
    return min(open_kinds, key=lambda kind: (struck[kind], tried[kind]), default=None)
