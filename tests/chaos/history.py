"""What the clients of a campaign asked for, and what they were told."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Seen:
    """An exploration as an answer showed it. `content` is a hash of all that was shown."""

    id: str
    owner: str
    state: str
    cancel_requested: bool
    labels: Mapping[str, str]
    seed: int
    content: str

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Seen:
        """Return what a document of the API shows."""
        names = ("id", "owner", "state", "cancel_requested", "labels")
        text = json.dumps(document, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return cls(**{name: document[name] for name in names}, seed=document["request"]["seed"], content=digest)

    @property
    def is_final(self) -> bool:
        """Whether the exploration had ended."""
        return self.state in {"succeeded", "failed", "cancelled"}


@dataclass
class Call:
    """One request, when it began and ended (in seconds since 1970), and the answer.

    Attributes:
        number: of a run report, or the seed of a submission.
        status: of the answer; null without one.
        error: why there is no answer.
        seen: what the answer shows.
        listed: the ids in a list.
    """

    operation: str
    owner: str
    job_id: str | None
    key: str | None = None
    number: int = 0
    started: float = 0.0
    ended: float = float("inf")
    status: int | None = None
    error: str | None = None
    seen: Seen | None = None
    listed: frozenset[str] | None = None

    @property
    def is_done(self) -> bool:
        """Whether the answer says that it was done."""
        return self.status is not None and 200 <= self.status < 300

    @property
    def may_be_done(self) -> bool:
        """Whether it was done, or may have been: there is no answer, or one that says to come back."""
        return self.is_done or self.status is None or self.status >= 500

    def describe(self) -> str:
        """Return the call and its answer in a line."""
        told = self.error if self.status is None else str(self.status)
        return f"{self.operation} {self.job_id or self.key} of {self.owner}: {told} after {self.seconds:.1f} s"

    @property
    def seconds(self) -> float:
        """How long the answer took."""
        return self.ended - self.started


@dataclass
class History:
    """All calls, in the order in which they began. Threads may add to it."""

    calls: list[Call] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, call: Call) -> None:
        """Note a call that begins."""
        with self.lock:
            self.calls.append(call)

    def of_jobs(self) -> dict[str, list[Call]]:
        """Return the calls by the job that they are about; a submission is about the job that it was answered with."""
        by_job: dict[str, list[Call]] = {}
        for call in self.calls:
            job_id = call.seen.id if call.seen is not None else call.job_id
            if job_id is not None:
                by_job.setdefault(job_id, []).append(call)
        return by_job


def named(calls: Iterable[Call], *operations: str) -> list[Call]:
    """Return the calls of some operations."""
    return [call for call in calls if call.operation in operations]
