"""The client for programs: it submits configurations and returns recommendations that `bexp.apply` takes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bexp.client.configuration import Configuration, read_configuration
from bexp.client.connection import EXPLORATIONS, ConnectedClient, Connection, exploration_path
from bexp.client.events import PATIENCE_SECONDS, follow_events
from bexp.client.exploration import Event, Exploration

if TYPE_CHECKING:
    from bexp.recommendation import Recommendation

DEFAULT_URL = "http://127.0.0.1:8642"


class Client(ConnectedClient):
    """Talks to one service. Close it, or use it in a `with`.

    `url` and `token` are those of BEXP_API_URL and BEXP_API_TOKEN if they are not given. `timeout` is in seconds, for
    one request. Every method raises `bexp.client.connection.ProblemError` if the service refuses the request, and
    `ServiceError` if it cannot be reached or fails.
    """

    def __init__(self, url: str | None = None, token: str | None = None, timeout: float = 30.0) -> None:
        self.connection = Connection(
            url or os.environ.get("BEXP_API_URL") or DEFAULT_URL, token or os.environ.get("BEXP_API_TOKEN"), timeout
        )

    def submit(self, config: Configuration, *, idempotency_key: str | None = None, **fields: Any) -> Exploration:
        """Submit a configuration, with `fields` of the request in place of its own.

        `config` is what `read_configuration` takes: a path, text, or an object.
        """
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        document = read_configuration(config, **fields)
        return Exploration.read(self.connection.request("POST", EXPLORATIONS, json=document, headers=headers))

    def get(self, exploration_id: str) -> Exploration:
        """Return one exploration."""
        return Exploration.read(self.connection.request("GET", exploration_path(exploration_id)))

    def list(self, **filters: Any) -> Iterator[Exploration]:
        """Yield explorations, the newest first. `filters` are parameters of `GET /v1/explorations`, such as `state`."""
        return map(Exploration.read, self.connection.pages(EXPLORATIONS, **filters))

    def cancel(self, exploration_id: str) -> Exploration:
        """Cancel an exploration; its worker stops within seconds."""
        return Exploration.read(self.connection.request("POST", exploration_path(exploration_id, "cancel")))

    def resume(self, exploration_id: str) -> Exploration:
        """Queue an exploration again that was cancelled or has failed; nothing that is stored is measured again."""
        return Exploration.read(self.connection.request("POST", exploration_path(exploration_id, "resume")))

    def events(
        self, exploration_id: str, *, after: int = 0, patience_seconds: float = PATIENCE_SECONDS
    ) -> Iterator[Event]:
        """Follow the events of an exploration to its end, each exactly once and in order.

        Raises ServiceError if the service cannot be reached for `patience_seconds`.
        """
        documents = follow_events(self.connection, exploration_id, after=after, patience_seconds=patience_seconds)
        return map(Event.read, documents)

    def wait(self, exploration_id: str) -> Exploration:
        """Wait for the end of an exploration, and return it."""
        for _ in self.events(exploration_id):
            pass
        return self.get(exploration_id)

    def answer(self, exploration_id: str) -> Mapping[str, Any] | None:
        """Return the recommendation as the service's document, to save as best.json; null while nothing is known."""
        found: Mapping[str, Any] | None = self.connection.recommendation(exploration_id)
        return found if found is not None and found.get("recommendation") is not None else None

    def recommendation(self, exploration_id: str) -> Recommendation | None:
        """Return the best candidate so far, as `bexp.apply` takes it; null while nothing is known."""
        from bexp.recommendation import Recommendation  # noqa: PLC0415 - for those who ask for it

        document = self.answer(exploration_id)
        return None if document is None else Recommendation.read(document)

    def export(self, exploration_id: str, name: str) -> str:
        """Return the answer as a file for a training framework; docs/exports.md lists the names."""
        path = exploration_path(exploration_id, "recommendation")
        return self.connection.send("GET", path, params={"format": name}).text

    def trials(self, exploration_id: str) -> Sequence[Mapping[str, Any]]:
        """Return the documents of all trials that are stored so far, in the order of their numbers."""
        found = self.connection.pages(exploration_path(exploration_id, "trials"))
        return sorted(found, key=lambda trial: trial["number"])
