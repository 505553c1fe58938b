"""The line between a process of a training command and the trial that has started it: a JSON object a line."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SOCKET = "BEXP_TUNE_SOCKET"
"""The variable that names the Unix socket of the trial."""
CHOICE = "BEXP_TUNE_CHOICE"
"""The variable with the settings of the trial, except its size, as a JSON object."""
SIZE = "BEXP_TUNE_SIZE"
"""The variable with the size of the trial or of the answer; absent until there is one."""
BRACES = "BEXP_TUNE_BRACES"
"""The variable of a trial that is set if this size stands in the command."""
STEPS = "BEXP_TUNE_STEPS"
"""The variable with the accumulation steps that belong to this size."""
SITE = "BEXP_TUNE_SITE"
"""The variable that names the folder with `bexp`, for the hook."""
PROMISE = "BEXP_TUNE_PROMISE"
"""The variable with the answer's promise, as a JSON object; set only in a command that runs with an answer."""
SCRATCH = "BEXP_TUNE_SCRATCH"
"""The variable that names a folder for files that the command would write elsewhere."""
serving: list[Any] = []
"""The Trainers of this process that measure. While there is one, no other loop is followed."""
asked: dict[str, Any] = {}
"""The loop of a library, if its size can be set from within: kind, size, accumulation and lengths as in the command.

`given_steps` are the accumulation steps that the trial has set.
"""

switched_off: list[str] = []
"""Parts of the command that this process has switched off, in order."""


def switch_off(what: str) -> None:
    """Note that a part of the command is off, for the trial; in a run with an answer, say so on stderr."""
    if what not in switched_off:
        switched_off.append(what)
        if PROMISE in os.environ:
            sys.stderr.write(f"bexp: {what} is off in this run, because it could change the batch\n")
            sys.stderr.flush()


class Link:
    """A connection to the trial. When it ends, so does this process, in the middle of a step as well."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="bexp-trial", daemon=True).start()

    def send(self, message: dict[str, Any]) -> None:
        """Send one message."""
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """Return the next message."""
        return self._messages.get()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            for line in self._socket.makefile("rb"):
                self._messages.put(json.loads(line))
        os._exit(0)


def connect() -> Link | None:
    """Connect to the trial; None in a process that belongs to none.

    RANK, which every launcher sets, identifies the processes of one training. The first speaks for all.
    """
    path = os.environ.get(SOCKET)
    return None if path is None or os.environ.get("RANK", "0") != "0" else Link(path)


def note_failure(reply: Mapping[str, Any]) -> None:
    """Write the error of this process of a group for the trial.

    The first process, which speaks for all, may know only that another one is gone.
    """
    address, rank = os.environ.get(SOCKET), os.environ.get("RANK")
    if address is not None and rank is not None:
        with contextlib.suppress(OSError):  # the trial is over
            Path(f"{address}.failed-{rank}").write_text(json.dumps({"rank": int(rank), **reply}))


def failures_in(folder: Path) -> list[Path]:
    """The files that `note_failure` has written next to the socket in a folder."""
    return list(folder.glob("*.failed-*"))


class CannotSetError(ValueError):
    """The trial asks for a setting that this training cannot take from within."""


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Send the trial what cannot be set, and end, so that no command catches the error and no traceback hides it."""
    try:
        yield
    except CannotSetError as error:
        link = connect()
        if link is None:
            signal.pause()  # the first process speaks, and the trial ends them all
        else:
            link.send({"event": "refused", "reason": str(error)})
            link.receive()
        os._exit(1)


def choice() -> dict[str, Any]:
    """The settings that this trial tries."""
    settings_tried: dict[str, Any] = json.loads(os.environ.get(CHOICE) or "{}")
    return settings_tried
