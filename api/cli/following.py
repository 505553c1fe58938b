"""Follows a job to its end: shows its events in a live view or as lines, and writes the log file."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from bexp.api.cli.errors import say
from bexp.api.live import LiveView
from bexp.api.run_log import RunLog, log_path
from bexp.client.explorations import Exploration, Explorations
from bexp.explorer.answers.text import wrap
from bexp.explorer.records.event import Event, EventCode, render_line
from bexp.explorer.records.recommendation import Recommendation

TICK_SECONDS = 0.2
_ANSWERED = {EventCode.SUCCEEDED, EventCode.NOTHING_FITS}
"""The ends that the printed answer announces."""


class Output(Protocol):
    """A place where events are shown."""

    def show(self, event: Event) -> None:
        """Show an event."""

    def tick(self) -> None:
        """Redraw, because time has passed."""


class LineOutput:
    """Prints one BEXP line for each event."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def show(self, event: Event) -> None:
        """Print the line of `event`."""
        typer.echo(render_line(event), file=self._stream)
        self._stream.flush()

    def tick(self) -> None:
        """Do nothing: lines do not change."""


class LiveOutput:
    """The live view, with the lines of important events above it.

    Some events get no line, because the view and the log file show them: trials, recommendations of the same
    micro-batch as before, and the end, which the answer follows.
    """

    def __init__(self, live: Live, view: LiveView) -> None:
        self._live = live
        self._view = view

    def show(self, event: Event) -> None:
        """Show `event`."""
        before = self._view.best
        self._view.show(event)
        if not self._is_known(event, before):
            line = wrap([render_line(event)], self._live.console.width, indent=len("BEXP000 "))
            self._live.console.print(Text("\n".join(line)))
        self._live.refresh()

    def _is_known(self, event: Event, before: Recommendation | None) -> bool:
        best = self._view.best
        if event.code is EventCode.RECOMMENDATION and before is not None and best is not None:
            return before.candidate.micro_batch_size == best.candidate.micro_batch_size
        return event.code is EventCode.TRIAL or event.code in _ANSWERED

    def tick(self) -> None:
        """Draw the clock."""
        self._live.refresh()


@contextmanager
def open_output(job: Exploration, *, to_stderr: bool) -> Iterator[Output]:
    """Return the live view on a terminal, lines elsewhere; `to_stderr` keeps stdout for JSON."""
    stream = sys.stderr if to_stderr else sys.stdout
    console = Console(file=stream)
    if not console.is_terminal or console.is_dumb_terminal:
        yield LineOutput(stream)
        return
    view = LiveView(job.id, job.request)
    with Live(view, console=console, auto_refresh=False, vertical_overflow="crop") as live:
        yield LiveOutput(live, view)


@contextmanager
def open_run_log(job: Exploration, directory: Path | None) -> Iterator[RunLog | None]:
    """Open the log file of `job` below `directory`; yield None without a directory, or, with a message, on an error."""
    if directory is None or job.request is None:
        yield None
        return
    path = log_path(directory, job.request.mode, job.request.explored.name, job.id)
    try:
        log = RunLog(path)
    except OSError as error:
        say(f"no log file: {error.strerror}: {path}")
        yield None
        return
    with log:
        say(f"log file: {path}" if log.is_writing else f"log file: {path} (another command writes it)")
        yield log


def follow(
    client: Explorations,
    job: Exploration,
    *,
    to_stderr: bool = False,
    log_dir: Path | None = None,
    check: Callable[[], None] = lambda: None,
) -> Event:
    """Show every event of `job`, write its log file below `log_dir` if that is given, and return the last event.

    `check` is called several times a second and may raise to give up. Raises the errors of `Explorations.events`.
    """
    received: queue.SimpleQueue[Event | Exception | None] = queue.SimpleQueue()

    def receive() -> None:
        try:
            for event in client.events(job.id):
                received.put(event)
            received.put(None)
        except Exception as error:  # noqa: BLE001 - raised again in the thread that waits
            received.put(error)

    with open_run_log(job, log_dir) as log, open_output(job, to_stderr=to_stderr) as output:
        threading.Thread(target=receive, name="events", daemon=True).start()
        last: Event | None = None
        while True:
            try:
                item = received.get(timeout=TICK_SECONDS)
            except queue.Empty:
                output.tick()
                check()
                continue
            if isinstance(item, Exception):
                check()
                raise item
            if item is None:
                assert last is not None, "a log has at least one event"
                return last
            last = item
            if log is not None:
                log.write(item)
            output.show(item)
