"""The settings of a worker. Only this module reads the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from bexp.storage.leases import QueueSettings, read_queue_settings, read_seconds
from bexp.storage.location import default_database_url

LOCAL_TARGET = "BEXP_LOCAL_TARGET"
"""What a person has named by its file, for a worker of their own. Their code may fetch what it likes."""
DEFAULT_MAX_POLL = timedelta(seconds=1)
DEFAULT_DEVICE_WAIT = timedelta(hours=4)


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """BEXP_DATABASE_URL, BEXP_LOCAL_TARGET, the settings of the queue, and the environment that profilers inherit.

    `local_target` is the target that a person has named by its file, as `/home/me/train.py:Target`. An idle worker asks
    for a job at intervals that grow to `max_poll` (BEXP_POLL_SECONDS). One whose device is held by another waits for
    `device_wait` (BEXP_DEVICE_WAIT_SECONDS), and then ends.

    BEXP_LOCK_DIRECTORY in that environment says where the device locks lie: `bexp.workers.devices.lock`.
    """

    database_url: str
    environment: Mapping[str, str]
    local_target: str | None = None
    queue: QueueSettings = field(default_factory=QueueSettings)
    max_poll: timedelta = DEFAULT_MAX_POLL
    device_wait: timedelta = DEFAULT_DEVICE_WAIT


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
