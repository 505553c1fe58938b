"""The duration of leases and the number of tries of a job. No SQLAlchemy: every process of a worker imports this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

LONGEST_PAUSE = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """The duration of leases, and the limits on tries. A stored trial sets both counts of tries to zero.

    Attributes:
        lease: how long a worker may be silent before another takes its job.
        max_attempts: a job is given up after this number of attempts that ended with the worker, its device or its
            host, and stored no trial.
        max_faults: a job fails after this number of internal errors of its own search, with no stored trial between.
        retry_pause: how long a job that was put back waits at first; the pause doubles with each attempt, up to
            LONGEST_PAUSE.
    """

    lease: timedelta = timedelta(seconds=30)
    max_attempts: int = 20
    max_faults: int = 3
    retry_pause: timedelta = timedelta(seconds=1)

    def pause(self, num_failures: int) -> timedelta:
        """Return the pause of a job after `num_failures` failures in a row."""
        doublings = min(max(0, num_failures - 1), 16)
        return min(self.retry_pause * (1 << doublings), LONGEST_PAUSE)


def read_queue_settings(variables: Mapping[str, str]) -> QueueSettings:
    """Read BEXP_LEASE_SECONDS, BEXP_MAX_ATTEMPTS, BEXP_MAX_FAULTS and BEXP_RETRY_SECONDS.

    Raises:
        ValueError: one of them is out of range.
    """
    default = QueueSettings()
    return QueueSettings(
        lease=read_seconds(variables, "BEXP_LEASE_SECONDS", default.lease, least=1.0),
        max_attempts=_read_count(variables, "BEXP_MAX_ATTEMPTS", default.max_attempts),
        max_faults=_read_count(variables, "BEXP_MAX_FAULTS", default.max_faults),
        retry_pause=read_seconds(variables, "BEXP_RETRY_SECONDS", default.retry_pause, least=0.0),
    )


def read_seconds(variables: Mapping[str, str], name: str, default: timedelta, *, least: float) -> timedelta:
    """Return a variable as a duration; an empty one counts as not set.

    Raises:
        ValueError: it is no number of seconds from `least` to 86400, a day (LONGEST_LEASE).
    """
    given = variables.get(name)
    if not given:
        return default
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not least <= seconds <= 86400:
        raise ValueError(f"{name} must be a number of seconds from {least:g} to 86400")
    return timedelta(seconds=seconds)


def _read_count(variables: Mapping[str, str], name: str, default: int) -> int:
    given = variables.get(name)
    if not given:
        return default
    if not (given.isascii() and given.isdigit() and len(given) < 9 and int(given) >= 1):
        raise ValueError(f"{name} must be a number from 1 to 99999999")
    return int(given)
