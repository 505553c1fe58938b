"""The service that the client talks to, with its queue and a scripted worker."""

from tests.api.cli.conftest import queue, service, stored_at, worker

__all__ = ["queue", "service", "stored_at", "worker"]
