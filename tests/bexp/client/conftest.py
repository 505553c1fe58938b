"""The service that the client talks to, with its queue and a scripted worker."""

from tests.api.cli.conftest import ending, queue, service, stored_at, worker

__all__ = ["ending", "queue", "service", "stored_at", "worker"]
