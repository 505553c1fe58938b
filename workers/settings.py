"""The settings of a worker. Only this module reads the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from bexp.storage.location import default_database_url
from bexp.storage.queue_settings import QueueSettings, read_queue_settings, read_seconds

LOCAL_TARGET = "BEXP_LOCAL_TARGET"
"""The target that a person has named by its file, for a worker of their own. Their code may download files."""
DEFAULT_MAX_POLL = timedelta(seconds=1)
DEFAULT_DEVICE_WAIT = timedelta(hours=4)


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The settings of a worker, by the variables that set them."""

    database_url: str
    """BEXP_DATABASE_URL."""
    environment: Mapping[str, str]
    """Inherited by profilers. BEXP_LOCK_DIRECTORY says where the device locks lie: `bexp.workers.devices.lock`."""
    local_target: str | None = None
    """BEXP_LOCAL_TARGET: the target that a person has named by its file, as `/home/me/train.py:Target`."""
    queue: QueueSettings = field(default_factory=QueueSettings)
    """The settings of the job queue."""
    max_poll: timedelta = DEFAULT_MAX_POLL
    """BEXP_POLL_SECONDS: an idle worker asks for a job at intervals that grow to this."""
    device_wait: timedelta = DEFAULT_DEVICE_WAIT
    """BEXP_DEVICE_WAIT_SECONDS: a worker whose device is held by another waits for so long, and then ends."""


def read_settings(variables: Mapping[str, str] | None = None) -> WorkerSettings:
    """Read `variables` (default: this process's environment). An empty variable counts as not set.

    Raises:
        ValueError: a variable is out of range.
    """
    given = dict(os.environ if variables is None else variables)
    url = given.get("BEXP_DATABASE_URL") or default_database_url(given.get("XDG_DATA_HOME", ""))
    return WorkerSettings(
        database_url=url,
        environment=given,
        local_target=given.get(LOCAL_TARGET) or None,
        queue=read_queue_settings(given),
        max_poll=read_seconds(given, "BEXP_POLL_SECONDS", DEFAULT_MAX_POLL, least=0.05),
        device_wait=read_seconds(given, "BEXP_DEVICE_WAIT_SECONDS", DEFAULT_DEVICE_WAIT, least=0.0),
    )
