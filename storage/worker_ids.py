"""The ids of workers. The module imports nothing slow, because commands need it."""

from __future__ import annotations


def worker_prefix(host: str, pid: int) -> str:
    """Return how the ids of the workers of a process begin."""
    return f"{host[:64]}-{pid}-"
