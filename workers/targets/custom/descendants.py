"""The processes that a training command has started."""

from __future__ import annotations

from contextlib import suppress

import psutil

from bexp.tune.link import SOCKET


def started_with(address: str) -> list[psutil.Process]:
    """Return those that know a trial's socket, whether or not their parent has ended or they have left its session."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(SOCKET) == address:
                found.append(process)
    return found
