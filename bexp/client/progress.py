"""Progress of what a Python program waits for: BEXP lines on stderr, as the commands print them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime

from bexp.explorer.records.event import Event, EventDraft, render_line


def in_notebook() -> bool:
    """Whether IPython runs this process."""
    shell = sys.modules.get("IPython")
    return shell is not None and shell.get_ipython() is not None


def is_watched() -> bool:
    """Whether a person sees what is written: stderr is a terminal, or this is a notebook."""
    return sys.stderr.isatty() or in_notebook()


def print_event(event: Event) -> None:
    """Print the line of an event."""
    sys.stderr.write(render_line(event) + "\n")
    sys.stderr.flush()


def numbered_printer() -> Callable[[EventDraft], None]:
    """Return what prints events that no log has numbered."""
    seq = 0

    def show(draft: EventDraft) -> None:
        nonlocal seq
        seq += 1
        print_event(Event(seq=seq, at=datetime.now(UTC), code=draft.code, message=draft.message, data=draft.data))

    return show
