"""Reads what compute-sanitizer's racecheck reports, and tells the hazards of Triton's own `warp_specialize` from ours.

Triton lowers `gl.warp_specialize` to a loop of the worker warps: they wait at a named barrier, and read from shared
memory which partition to run. The first warps write that before the barrier, and again at the end. All warps take part
in each of these barriers (`barrier.sync 1` in the PTX), so that reads and writes are in order, but they arrive from
different places of the code, and racecheck calls the accesses hazards. Their places are the kernel's `def` and the
statement that holds the call. Accesses of ours have other places: the functions of the partitions.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

MARK = "case "
_ROOT = Path(__file__).parents[2]
_FIRST = re.compile(r"=+ (?:Error|Warning): Race reported between \w+ access at (.*)")
_OTHER = re.compile(r"=+ +and \w+ access at (.*)")
_PLACE = re.compile(r"(?P<kernel>\w+)(?:\(.*\))?\+0x[0-9a-f]+ in (?:.*/)?(?P<file>[\w.-]+):(?P<line>\d+)")


@dataclass(frozen=True)
class Access:
    """An access to shared memory: the kernel and the line of the source that the compiler names."""

    kernel: str
    file: str
    line: int


@dataclass(frozen=True)
class Race:
    """A report: the case that ran, and the accesses. An access whose place is not known is null."""

    case: str
    accesses: tuple[Access | None, ...]

    @property
    def of_warp_specialize(self) -> bool:
        """Whether every access is Triton's, by its place."""
        return all(each is not None and _is_of_warp_specialize(each) for each in self.accesses)


def races(output: str) -> list[Race]:
    """The reports in what racecheck and the cases print."""
    found: list[Race] = []
    case = ""
    for line in output.splitlines():
        if line.startswith(MARK):
            case = line.removeprefix(MARK)
        elif first := _FIRST.match(line):
            found.append(Race(case, (_access(first[1]),)))
        elif (other := _OTHER.match(line)) and found:
            found[-1] = Race(found[-1].case, (*found[-1].accesses, _access(other[1])))
    return found


def only_of_warp_specialize(output: str, control: str) -> bool:
    """Whether racecheck found nothing else, and found it in the case `control`, which does nothing else."""
    found = races(output)
    told = re.findall(r"RACECHECK SUMMARY: (\d+) hazards? displayed", output)
    complete = told == [str(len(found))]  # what is not displayed cannot be judged
    return complete and any(race.case == control for race in found) and all(race.of_warp_specialize for race in found)


def _access(text: str) -> Access | None:
    place = _PLACE.match(text)
    return None if place is None else Access(place["kernel"], place["file"], int(place["line"]))


def _is_of_warp_specialize(access: Access) -> bool:
    return access.line in _lines_of_warp_specialize(access.kernel, access.file)


@lru_cache
def _lines_of_warp_specialize(kernel: str, file: str) -> frozenset[int]:
    """The line of the kernel's `def`, and those of its statement with the call; none if it has no such call."""
    return frozenset(line for function in _functions(kernel, file) for line in _lines(function))


def _functions(kernel: str, file: str) -> Iterator[ast.FunctionDef]:
    for folder in ("bexp", "tests/gpu"):
        for path in (_ROOT / folder).rglob(file):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef) and node.name == kernel:
                    yield node


def _lines(function: ast.FunctionDef) -> Iterator[int]:
    for statement in function.body:
        if any(isinstance(node, ast.Attribute) and node.attr == "warp_specialize" for node in ast.walk(statement)):
            yield function.lineno
            yield from range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
