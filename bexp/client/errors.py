"""What is raised if an exploration cannot be submitted, followed or read, wherever it is kept."""

from __future__ import annotations

from typing import Any


class ServiceError(Exception):
    """The service, the database or the worker cannot be reached, or failed, or its answer cannot be understood."""


class ProblemError(Exception):
    """A request was refused.

    `problem` is an RFC 9457 document, `status` the HTTP status.
    """

    def __init__(self, status: int, problem: dict[str, Any]) -> None:
        self.status = status
        self.problem = problem
        super().__init__(str(problem.get("detail") or problem.get("title") or f"HTTP {status}"))

    @property
    def name(self) -> str:
        """What the problem's type ends with: `unknown-exploration`; empty if it has none."""
        return str(self.problem.get("type") or "").rpartition(":")[2]

    def lines(self) -> list[str]:
        """Return lines for a person: what is wrong, then each field with the rule that it breaks."""
        errors = self.problem.get("errors")
        listed = [_error_line(e) for e in errors if isinstance(e, dict)] if isinstance(errors, list) else []
        return [str(self), *listed]


def _error_line(error: dict[str, Any]) -> str:
    where, rule = error.get("field"), error.get("message") or "is wrong"
    return f"{where}: {rule}" if where else str(rule)
