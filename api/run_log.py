"""The log file of an exploration: `local_compile_train/<model>/run_<id>.log`, where Cerebras' tools write theirs."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path
from types import TracebackType
from typing import IO, Literal, Self

from bexp.explorer.records.event import Event, render_line
from bexp.private_files import make_private_folder, private


def log_path(directory: Path, mode: Literal["train", "eval"], model_name: str, job_id: str) -> Path:
    """Return the file for the BEXP lines of a job. It is below `directory`, whatever the names of model and job."""
    return directory / f"local_compile_{mode}" / _file_name(model_name) / f"run_{_file_name(job_id)}.log"


def _file_name(name: str) -> str:
    """Return `name` as one part of a path, which never leads out of its folder."""
    return re.sub(r"[^A-Za-z0-9._ -]|^\.+", "-", name)[:128] or "-"


class RunLog:
    """Appends the BEXP line of each event once, however often a job is watched. Only this user can read the file.

    Events are numbered from 1 without gaps and each is one line, so the file has as many lines as its last event's
    number. While one process writes a file, others that open it write nothing.

    Raises OSError if the file cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        make_private_folder(path.parent)
        self._file: IO[bytes] | None = os.fdopen(private(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            return
        self._file.seek(0)
        text = self._file.read()
        self._seq = text.count(b"\n")
        self._file.truncate(text.rfind(b"\n") + 1)  # a line that a killed process left unfinished

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_writing(self) -> bool:
        """Whether this process writes the file; false if another process does."""
        return self._file is not None

    def write(self, event: Event) -> None:
        """Append the line of `event` if it is not in the file yet."""
        if self._file is None or event.seq <= self._seq:
            return
        self._file.write(render_line(event).encode() + b"\n")
        self._file.flush()
        self._seq = event.seq

    def close(self) -> None:
        """Close the file and let others write it."""
        if self._file is not None:
            self._file.close()
            self._file = None
