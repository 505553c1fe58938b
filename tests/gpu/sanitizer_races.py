"""Reads the hazards of compute-sanitizer's racecheck, and tells those of Triton's `warp_specialize` from ours.

Triton lowers `gl.warp_specialize` to a loop of the worker warps: they wait at a named barrier, and each reads from a
byte of its own in shared memory which partition to run. The first warps write these bytes before the barrier, and again
at the end. All warps take part in each of these barriers (`barrier.sync 1` in the PTX), so that reads and writes are in
order, but they arrive from different places of the code, and racecheck calls the accesses hazards.

A hazard counts as Triton's if both of its places are the kernel's `def` or the statement that holds the call, and if a
worker warp reads the byte of its own number: the byte of the first worker, and one more for each warp after it. What
our partitions share has other places, and other bytes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

MARK = "case "
WARP = 32
FIRST_WARPS = 4
"""The warps of the first partition in all our kernels; the others are workers."""
_ROOT = Path(__file__).parents[2]
_HAZARD = re.compile(r"=+ .*[Pp]otential \w+ hazard detected at (?:__shared__ (0x[0-9a-f]+))?")
_ACCESS = re.compile(r"=+ +(Read|Write) Thread \((\d+),0,0\) at (.*)")
_PLACE = re.compile(r"(?P<kernel>\w+)(?:\(.*\))?\+(?P<offset>0x[0-9a-f]+) in (?:.*/)?(?P<file>[\w.-]+):(?P<line>\d+)")


@dataclass(frozen=True)
class Access:
    """An access to shared memory: its thread, the kernel, the instruction, and the line that the compiler names."""

    kind: str
    thread: int
    kernel: str
    offset: str
    file: str
    line: int


@dataclass(frozen=True)
class Hazard:
    """Two accesses to a byte, in the case that ran. An address or an access that cannot be read is missing."""

    case: str
    address: int | None
    accesses: tuple[Access, ...]

    @property
    def first_byte(self) -> int | None:
        """The byte of the first worker, if this is a worker that reads its own; null if it is something else."""
        kinds = {access.kind: access for access in self.accesses}
        if self.address is None or len(self.accesses) != 2 or kinds.keys() != {"Read", "Write"}:
            return None
        if not all(_is_of_warp_specialize(access) for access in self.accesses):
            return None
        worker, lane = divmod(kinds["Read"].thread, WARP)
        is_worker = worker >= FIRST_WARPS and lane == 0 and kinds["Write"].thread < FIRST_WARPS * WARP
        return self.address - (worker - FIRST_WARPS) if is_worker else None

    @property
    def instructions(self) -> tuple[str, ...]:
        """What it is a hazard of: the same instructions of one case use the same bytes."""
        return (self.case, *(f"{access.kernel}+{access.offset}" for access in self.accesses))


def hazards(output: str) -> list[Hazard]:
    """The hazards in what racecheck and the cases print."""
    found: list[Hazard] = []
    case = ""
    for line in output.splitlines():
        if line.startswith(MARK):
            case = line.removeprefix(MARK)
        elif hazard := _HAZARD.match(line):
            found.append(Hazard(case, int(hazard[1], 16) if hazard[1] else None, ()))
        elif (access := _ACCESS.match(line)) and found and (place := _PLACE.match(access[3])):
            where = Access(
                access[1], int(access[2]), place["kernel"], place["offset"], place["file"], int(place["line"])
            )
            found[-1] = Hazard(found[-1].case, found[-1].address, (*found[-1].accesses, where))
    return found


def num_of_warp_specialize(found: Iterable[Hazard]) -> int:
    """How many are of `warp_specialize`. Where the bytes of the same instructions differ, none of these is."""
    bytes_of: dict[tuple[str, ...], list[int | None]] = {}
    for hazard in found:
        bytes_of.setdefault(hazard.instructions, []).append(hazard.first_byte)
    return sum(len(first) for first in bytes_of.values() if None not in first and len(set(first)) == 1)


def only_of_warp_specialize(output: str) -> bool:
    """Whether racecheck found nothing else, and displayed all that it found."""
    found = hazards(output)
    told = re.findall(r"RACECHECK SUMMARY: (\d+) hazards? displayed", output)
    return told == [str(len(found))] and num_of_warp_specialize(found) == len(found)


def _is_of_warp_specialize(access: Access) -> bool:
    return access.line in _lines_of_warp_specialize(access.kernel, access.file)


@lru_cache
def _lines_of_warp_specialize(kernel: str, file: str) -> frozenset[int]:
    """The line of the kernel's `def`, and those of its statement with the call; none if it has no such call."""
    return frozenset(line for function in _functions(kernel, file) for line in _lines(function))


def _functions(kernel: str, file: str) -> Iterator[ast.FunctionDef]:
    for path in (_ROOT / "bexp").rglob(file):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name == kernel:
                yield node


def _lines(function: ast.FunctionDef) -> Iterator[int]:
    for statement in function.body:
        if any(isinstance(node, ast.Attribute) and node.attr == "warp_specialize" for node in ast.walk(statement)):
            yield function.lineno
            yield from range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
