"""The ids of workers. The module imports nothing slow, because commands need it."""

from __future__ import annotations

import secrets


def worker_prefix(host: str, pid: int) -> str:
    """Return how the ids of the workers of a process begin."""
    return f"{host[:64]}-{pid}-"


def new_worker_name() -> str:
    """Return a name that no worker has."""
    return secrets.token_hex(8)


def new_job_id() -> str:
    """Return an id that no job has."""
    return secrets.token_hex(8)
