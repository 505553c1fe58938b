"""What trials of a training command wait for: lines that they leave for who has started them, in a folder of theirs."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_FILE = "waiting"


def note(folder: Path, text: str) -> None:
    """Leave a line."""
    with suppress(OSError), (folder / _FILE).open("a") as file:  # the command that would read it has ended
        file.write(f"{text}\n")


class Notes:
    """The lines that trials leave in a folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _FILE
        self._read = 0

    def new(self) -> list[str]:
        """Return the lines since the last call."""
        with suppress(OSError):
            lines = self._path.read_text().splitlines()
            self._read, new = len(lines), lines[self._read :]
            return new
        return []
