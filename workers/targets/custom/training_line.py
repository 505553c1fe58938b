"""The Unix socket over which a trial and its training speak, in lines of JSON."""

from __future__ import annotations

import json
import selectors
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.1


class TrainingLine:
    """A socket at `path` that speaks with one training at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._line: socket.socket | None = None
        self._received = b""

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to the training, which has sent one before."""
        assert self._line is not None, "the training has described itself"
        with suppress(OSError):  # if it has ended, its output says why
            self._line.sendall(json.dumps(message).encode() + b"\n")

    def take(self) -> dict[str, Any] | None:
        """Return the next message of those that were read; None if there is none."""
        if b"\n" not in self._received:
            return None
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def read(self) -> bool:
        """Accept the training's connection, or read from it, for a moment; return whether anything came."""
        waiting = self._listener if self._line is None else self._line
        with selectors.DefaultSelector() as selector:
            selector.register(waiting, selectors.EVENT_READ)
            if not selector.select(POLL_SECONDS):
                return False
        if self._line is None:
            self._line, _ = self._listener.accept()
            return True
        with suppress(OSError):
            found = self._line.recv(1 << 16)
            self._received += found
            if found:
                return True
        time.sleep(POLL_SECONDS)  # the line has ended, and the process is about to
        return False

    def hang_up(self) -> None:
        """Forget this training; another one may call."""
        if self._line is not None:
            self._line.close()
        self._line, self._received = None, b""

    def close(self) -> None:
        """Listen no more."""
        self.hang_up()
        self._listener.close()
