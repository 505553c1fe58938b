"""What processes of a benchmark do that end it. They import nothing that takes long."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.isolation import Send

TURNS = "turns"
BAD = "bad"


@dataclass(frozen=True)
class NamedCell:
    """Stands for a cell whose contenders take turns; one of them may end the process."""

    name: str
    ends: bool = False

    @property
    def key(self) -> dict[str, Any]:
        return {"case": self.name, "dtype": "float16"}


def hang(send: Send) -> None:
    send("one")
    time.sleep(600)


def die(
    send: Send, cells: list[NamedCell], device: str, without: frozenset[str], never: frozenset[str], seconds: float
) -> None:
    """The first cell has a contender that takes the process down."""
    for number, cell in enumerate(cells):
        names = [name for name in ("good", BAD) if name not in without or number]
        for name in names:
            send(name)
            if name == BAD and cell is cells[0] and cell.ends:
                os._exit(3)
        figures = {"outcome": "ok", "peak_bytes": None, "largest_error": 0.0}
        rows = [cell.key | {"load": "even", "contender": name, **figures} for name in names]
        send((number, rows))
        send(TURNS)
        send((number, rows))
