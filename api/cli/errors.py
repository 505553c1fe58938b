"""The end of a command: exit codes, and lines on stderr."""

from __future__ import annotations

import shutil
import sys
from enum import IntEnum

from bexp.explorer.answers.text import wrap


class ExitCode(IntEnum):
    """The exit statuses of a command."""

    ANSWER = 0
    NO_ANSWER = 1  # nothing fits, the exploration was cancelled, or nothing is known yet
    USAGE = 2  # the command line, the configuration, the id or the token is wrong
    SERVICE = 3  # the service or its worker cannot be reached, or failed


class CommandError(Exception):
    """Ends a command with `code` after printing `lines` on stderr."""

    def __init__(self, code: ExitCode, *lines: str) -> None:
        self.code = code
        self.lines = lines
        super().__init__("\n".join(lines))


def say(text: str) -> None:
    """Print lines to stderr, because stdout holds the result alone. On a terminal they break between words."""
    if sys.stderr.isatty():
        text = "\n".join(wrap(text.split("\n"), shutil.get_terminal_size().columns, indent=4))
    sys.stderr.write(f"{text}\n")  # rich replaces this stream while it draws, so that the line comes above the drawing
    sys.stderr.flush()
