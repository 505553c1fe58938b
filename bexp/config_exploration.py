"""Explores a configuration from Python or a notebook: on a service, or on this machine if none answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bexp.child_process import module_command, safe_environment
from bexp.client.client import Client
from bexp.client.configuration import Configuration, read_configuration
from bexp.client.connection import ServiceError
from bexp.client.events import PATIENCE_SECONDS
from bexp.client.exploration import Exploration
from bexp.client.view import ExplorationView

if TYPE_CHECKING:
    from bexp.recommendation import Recommendation

SESSION = "bexp.api.session"
GRACE_SECONDS = 15.0


class ExplorationError(Exception):
    """The exploration could not be run; the message says why."""


@dataclass(frozen=True)
class ExplorationResult:
    """An exploration that has ended. In a notebook it shows its table and its bars.

    `recommendation` is what `bexp.apply` takes; it is null if nothing fits. `trials` are the service's documents of
    every measurement. `document` is the whole answer.
    """

    exploration: Exploration
    recommendation: Recommendation | None
    trials: Sequence[Mapping[str, Any]]
    document: Mapping[str, Any] | None
    view: ExplorationView

    def __str__(self) -> str:
        return str(self.view)

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
    **fields: Any,
) -> ExplorationResult:
    """Explore a configuration, wait for the end and return the result.

    Args:
        config: a path, text, or an object: a request, a Hugging Face config.json, or a Cerebras configuration.
        device: cpu, cuda:0, cuda:0-3 or replay:TABLE, for a worker that this call starts on this machine.
        url: of the service; default: BEXP_API_URL. Without both, or with `device`, the exploration runs here.
        token: of the service; default: BEXP_API_TOKEN.
        on_update: called with the view after each event. The default shows a live table in a notebook.
        fields: fields of the request, such as `batch_size=512` or `budget={"max_seconds": 60}`.

    Raises:
        ExplorationError: the configuration is wrong, or the device cannot be used.
        ProblemError, ServiceError: the service refuses the configuration, or cannot be reached.
        KeyboardInterrupt: an exploration on this machine is cancelled then; one on a service goes on.
    """
    document = read_configuration(config, **fields)
    url = url or os.environ.get("BEXP_API_URL")
    if url and device is None:
        with Client(url, token) as client:
            return _follow(client, client.submit(document), on_update, PATIENCE_SECONDS)
    with _session(document, device) as session, Client(session.url) as client:
        try:
            return _follow(client, client.get(session.exploration_id), on_update, patience_seconds=2.0)
        except ServiceError as error:
            raise ExplorationError(session.trouble() or str(error)) from error


def _follow(
    client: Client,
    exploration: Exploration,
    on_update: Callable[[ExplorationView], None] | None,
    patience_seconds: float,
) -> ExplorationResult:
    view = ExplorationView(exploration.id, exploration.model)
    update = on_update or _notebook_display()
    for event in client.events(exploration.id, patience_seconds=patience_seconds):
        view.show(event)
        update(view)
    ended = client.get(exploration.id)
    recommendation = client.recommendation(exploration.id)
    return ExplorationResult(ended, recommendation, client.trials(exploration.id), client.answer(exploration.id), view)


def _notebook_display() -> Callable[[ExplorationView], None]:
    """Return what shows a view: one output of a notebook that changes, or nothing elsewhere."""
    shell = sys.modules.get("IPython")
    if shell is None or shell.get_ipython() is None:
        return lambda _: None
    from IPython.display import display  # noqa: PLC0415 - IPython has been imported by the notebook

    handle: Any = None

    def update(view: ExplorationView) -> None:
        nonlocal handle
        if handle is None:
            handle = display(view, display_id=True)
        else:
            handle.update(view)

    return update


class _Session:
    """A child process that runs one exploration on this machine, with a service of its own."""

    def __init__(self, process: subprocess.Popen[str], url: str, exploration_id: str) -> None:
        self._process = process
        self.url = url
        self.exploration_id = exploration_id

    def trouble(self) -> str:
        """Return why the child has ended early; nothing if it said nothing."""
        assert self._process.stdout is not None, "it is a pipe"
        line = self._process.stdout.readline() if self._process.poll() is not None else ""
        return str(json.loads(line)["error"]) if line else ""


@contextmanager
def _session(document: Mapping[str, Any], device: str | None) -> Iterator[_Session]:
    """Start the child; it cancels the exploration and ends when its stdin is closed."""
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
    assert process.stdout is not None, "it is a pipe"
    with process:
        try:
            with suppress(BrokenPipeError):  # it has ended, and says why
                process.stdin.write(json.dumps({"document": document, "device": device}) + "\n")
                process.stdin.flush()
            line = process.stdout.readline()
            said = json.loads(line) if line else {"error": _last_line(process)}
            if "error" in said:
                raise ExplorationError(said["error"])
            yield _Session(process, said["url"], said["id"])
        finally:
            with suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _last_line(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None, "it is a pipe"
    lines = process.stderr.read().strip().splitlines()
    return f"the service is not installed beside bexp, or does not start: {lines[-1] if lines else 'no reason given'}"
