"""Exploration of a configuration from Python or a notebook, on a service or on this machine."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bexp.child_process import module_command, safe_environment
from bexp.client.client import Client
from bexp.client.configuration import Configuration, read_configuration
from bexp.client.explorations import Exploration
from bexp.client.progress import in_notebook, is_watched, print_event
from bexp.client.view import ExplorationView
from bexp.explorer.answers.lines import render
from bexp.explorer.records.event import Event

if TYPE_CHECKING:
    from bexp.trainer.recommended_setup import RecommendedSetup

SESSION = "bexp.api.session"
GRACE_SECONDS = 15.0
Show = Callable[[ExplorationView, Event | None], None]
"""Shows a view after an event, and once more at the end."""


class ExplorationError(Exception):
    """The exploration could not be run; the message says why."""


@dataclass(frozen=True, repr=False)
class ExplorationResult:
    """An exploration that has ended. It prints as the lines of the answer, and in a notebook as a table with bars."""

    exploration: Exploration
    recommendation: RecommendedSetup | None
    """For `bexp.apply`: the candidate that divides a stated batch, as exports take it. None if nothing fits."""
    trials: Sequence[Mapping[str, Any]]
    """The service's documents of every measurement."""
    document: Mapping[str, Any] | None
    """The whole answer."""
    view: ExplorationView

    def __repr__(self) -> str:
        text = self.exploration.text
        return str(self.view) if text is None else render(text, brief=True)

    def _repr_html_(self) -> str:
        return self.view._repr_html_()

    def save(self, path: str | Path) -> None:
        """Write the answer as `bexp.apply` reads it. Raises ExplorationError if there is none."""
        if self.document is None:
            raise ExplorationError("nothing is recommended, so there is nothing to save")
        Path(path).write_text(json.dumps(self.document, indent=2), encoding="utf-8")


def explore_config(
    config: Configuration,
    *,
    device: str | None = None,
    url: str | None = None,
    token: str | None = None,
    on_update: Callable[[ExplorationView], None] | None = None,
    progress: bool | None = None,
    **fields: Any,
) -> ExplorationResult:
    """Explore a configuration, wait for the end and return the result.

    Args:
        config: a path, text, or an object: a request, a Hugging Face config.json, or a Cerebras configuration.
        device: cpu, cuda:0, cuda:0-3 or replay:TABLE, for a worker that this call starts on this machine.
        url: of the service; default: BEXP_API_URL. Without both, or with `device`, the exploration runs here.
        token: of the service; default: BEXP_API_TOKEN.
        on_update: called with the view after each event.
        progress: whether to show a live table in a notebook, and elsewhere a line on stderr for each event, as
            `bexp explore` prints it. Default: in a notebook, or if stderr is a terminal, without `on_update`.
        fields: fields of the request, such as `batch_size=512` or `budget={"max_seconds": 60}`.

    Raises:
        ExplorationError: the configuration is wrong, or the device cannot be used.
        ProblemError, ServiceError: the service refuses the configuration, or cannot be reached.
        KeyboardInterrupt: an exploration on this machine is cancelled then; one on a service goes on.
    """
    document = read_configuration(config, **fields)
    show = _shower(progress=on_update is None and is_watched() if progress is None else progress, update=on_update)
    url = url or os.environ.get("BEXP_API_URL")
    if not url or device is not None:
        return _explore_here(document, device, show)
    with Client(url, token) as client:
        exploration = client.submit(document)
        view = ExplorationView(exploration.id, exploration.model)
        for event in client.events(exploration.id):
            view.show(event)
            show(view, event)
        ended, trials = client.get(exploration.id), client.trials(exploration.id)
        documents = [trial.model_dump(mode="json") for trial in trials]
        return _result(ended, documents, client.answer(ended.id), view, show)


def _result(
    ended: Exploration,
    trials: Sequence[Mapping[str, Any]],
    result: Mapping[str, Any] | None,
    view: ExplorationView,
    show: Show,
) -> ExplorationResult:
    from bexp.trainer.recommended_setup import RecommendedSetup  # noqa: PLC0415 - for those who ask for it

    document = result if result is not None and result.get("recommendation") is not None else None
    recommendation = None if document is None else RecommendedSetup.read(document)
    if document is not None:
        view.conclude(ended)
        show(view, None)
    return ExplorationResult(ended, recommendation, trials, document, view)


def _shower(*, progress: bool, update: Callable[[ExplorationView], None] | None) -> Show:
    """Return the function that shows a view after an event, in one output of a notebook or as lines elsewhere."""
    display = _notebook_display() if progress and in_notebook() else None

    def show(view: ExplorationView, event: Event | None) -> None:
        if display is not None:
            display(view)
        elif progress and event is not None:
            print_event(event)
        if update is not None:
            update(view)

    return show


def _notebook_display() -> Callable[[ExplorationView], None]:
    """Return the function that shows a view in one output of a notebook."""
    from IPython.display import display  # noqa: PLC0415 - IPython has been imported by the notebook

    handle: Any = None

    def update(view: ExplorationView) -> None:
        nonlocal handle
        if handle is None:
            handle = display(view, display_id=True)
        else:
            handle.update(view)

    return update


def _explore_here(document: Mapping[str, Any], device: str | None, show: Show) -> ExplorationResult:
    """Run one exploration in a child process, so that this process neither imports SQL nor takes the device."""
    view: ExplorationView | None = None
    with _session(document, device) as messages:
        for message in messages:
            if "error" in message:
                raise ExplorationError(message["error"])
            if "event" in message:
                assert view is not None, "the exploration comes first"
                view.show(event := Event.model_validate(message["event"]))
                show(view, event)
                continue
            exploration = Exploration.model_validate(message["exploration"])
            if "trials" in message:
                assert view is not None, "the exploration comes first"
                return _result(exploration, message["trials"], message["result"], view, show)
            view = ExplorationView(exploration.id, exploration.model)
    raise ExplorationError("the exploration ended without a word")


@contextmanager
def _session(document: Mapping[str, Any], device: str | None) -> Iterator[Iterator[dict[str, Any]]]:
    """Start the child and yield its messages. The child cancels the exploration and ends once its stdin is closed."""
    process = subprocess.Popen(
        module_command(SESSION),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=safe_environment(os.environ),
        start_new_session=True,  # Ctrl-C in the terminal reaches this process alone
        text=True,
    )
    assert process.stdin is not None, "it is a pipe"
    with process:
        try:
            with suppress(BrokenPipeError):  # it has ended, and says why
                process.stdin.write(json.dumps({"document": document, "device": device}) + "\n")
                process.stdin.flush()
            yield _messages(process)
        finally:
            with suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _messages(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None, "it is a pipe"
    line = process.stdout.readline()
    if not line:
        yield {"error": _last_line(process)}
    while line:
        yield json.loads(line)
        line = process.stdout.readline()


def _last_line(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None, "it is a pipe"
    lines = process.stderr.read().strip().splitlines()
    return f"the service is not installed with bexp, or does not start: {lines[-1] if lines else 'no reason given'}"
