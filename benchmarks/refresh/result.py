"""A recorded result, which of its rows are missing, and in which order results are worth the time of a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from benchmarks.continuation import PACKAGES
from benchmarks.environment import describe_environment, is_of_these_kernels

Results = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """What a command is told: where it writes, on which device, for how long, and which rows are missing."""

    out: Path
    device: str
    seconds: float
    missing: tuple[str, ...]

    @property
    def minutes(self) -> str:
        """The time, as commands take it."""
        return f"{self.seconds / 60:.2f}"


@dataclass(frozen=True)
class Recorded:
    """A result that one command writes and continues.

    `rows` are the names of all its rows, `found` names those that a file has, and `command` gives the command. The
    seconds are a guess for one row, and for what comes before the first. `value` is what a row is worth. `builds` are
    the commands that build kernels beforehand; those in `large_builds` need much memory. `summary` is a file that the
    command `summarize` prints from the result.
    """

    name: str
    file: str
    rows: tuple[str, ...]
    found: Callable[[Results], Iterable[str]]
    command: Callable[[Step], list[str]]
    row_seconds: float
    value: float = 1.0
    start_seconds: float = 20.0
    num_devices: int = 1
    of_kernels: bool = True
    builds: tuple[tuple[str, ...], ...] = ()
    large_builds: tuple[tuple[str, ...], ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    summary: str | None = None
    summarize: Callable[[Path], list[str]] | None = None

    def read(self, folder: Path) -> Results | None:
        """Return what the file in a folder holds; null if there is none, or none that can be read."""
        try:
            if self.file.endswith(".jsonl"):
                return {"lines": [json.loads(line) for line in (folder / self.file).read_text().splitlines()]}
            found: Results = json.loads((folder / self.file).read_text())
        except (OSError, ValueError):
            return None
        return found

    def rows_in(self, results: Results | None) -> set[str]:
        """Return the names of the rows that results have; a file of another form has none."""
        try:
            return set() if results is None else set(self.found(results))
        except (KeyError, TypeError, AttributeError):
            return set()

    def state(self, folder: Path, drafts: Path) -> State:
        """Return what is recorded, and what a draft has of it."""
        return State(self, self.read(folder), self.read(drafts))


@dataclass(frozen=True)
class State:
    """A result with its file, and its draft: an incomplete file of today's kernels."""

    result: Recorded
    recorded: Results | None
    draft: Results | None

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """The rows that neither the file nor the draft has of today's kernels."""
        known = {row for results in (self.recorded, self.draft) for row in self._current(results)}
        return tuple(row for row in self.result.rows if row not in known)

    @property
    def is_replaced(self) -> bool:
        """Whether the draft has every row of the file and more, or the same of later kernels."""
        rows, draft = set(self.result.rows), set(self._current(self.draft))
        before = rows & self.result.rows_in(self.recorded)
        return bool(draft) and draft >= before and (draft != before or not self.is_current)

    @property
    def is_current(self) -> bool:
        """Whether the file is of today's kernels."""
        return self.recorded is not None and self._is_current(self.recorded)

    @property
    def seconds(self) -> float:
        """A guess of what the missing rows take."""
        return self.result.start_seconds + self.result.row_seconds * len(self.missing)

    def __str__(self) -> str:
        total = len(self.result.rows)
        if not self.missing and self.is_replaced:
            return (
                f"{self.result.name}: all {total} rows are of today's kernels, in a draft that takes the file's place"
            )
        if not self.missing:
            return f"{self.result.name}: all {total} rows are of today's kernels"
        age = " of earlier kernels" if self.recorded is not None and not self.is_current else ""
        kept = f", {len(set(self._current(self.draft)))} rows in a draft" if self.draft is not None else ""
        there = "no file" if self.recorded is None else f"a file{age}"
        return f"{self.result.name}: {there}{kept}; {len(self.missing)} of {total} rows missing, {self.seconds:.0f} s"

    def _is_current(self, results: Results) -> bool:
        return not self.result.of_kernels or (is_of_these_kernels(results) and is_of_these_versions(results))

    def _current(self, results: Results | None) -> Iterable[str]:
        return self.result.rows_in(results) if results is not None and self._is_current(results) else ()


def is_of_these_versions(results: Results) -> bool:
    """Whether results are of the versions installed here, as far as they say so; true on a machine without a GPU."""
    recorded = results.get("environment", {}).get("packages", {})
    installed = describe_environment()["packages"]
    return not torch.cuda.is_available() or all(
        recorded[name] == installed.get(name) for name in PACKAGES if name in recorded
    )


def in_order(states: Iterable[State], seconds: float) -> list[State]:
    """Return what is missing and can begin, the most value per expected second first.

    A result that does not fit as a whole counts with the rows that fit.
    """
    worth = {state.result.name: _worth(state, seconds) for state in states if state.missing}
    todo = [state for state in states if worth.get(state.result.name, 0) > 0]
    return sorted(todo, key=lambda state: (-worth[state.result.name], state.result.name))


def _worth(state: State, seconds: float) -> float:
    result = state.result
    rows = min(len(state.missing), int((seconds - result.start_seconds) // result.row_seconds))
    return result.value * rows / (result.start_seconds + result.row_seconds * rows) if rows > 0 else 0.0
