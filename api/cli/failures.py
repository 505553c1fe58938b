"""Known failures of what a command calls, as lines for a person and an exit code."""

from __future__ import annotations

from http import HTTPStatus

from bexp.api.cli.errors import CommandError, ExitCode
from bexp.api.local_worker import WorkerEndedError
from bexp.client.errors import ProblemError, ServiceError
from bexp.explorer.formats.document import FormatError, describe_problem
from bexp.explorer.model.translation import Problem

_EXTRAS = dict.fromkeys(("fastapi", "prometheus_client", "starlette", "uvicorn"), "service") | {"mcp": "mcp"}
"""The extra that installs each package."""
_TRY_AGAIN = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS}


def describe_failure(error: Exception) -> CommandError | None:
    """Return the end of a command after `error`; None if the error is a defect."""
    match error:
        case FormatError():
            return CommandError(ExitCode.USAGE, "the configuration is wrong", *map(_describe_problem, error.errors))
        case ProblemError():
            code = ExitCode.SERVICE if error.status in _TRY_AGAIN else ExitCode.USAGE
            hint = ["set BEXP_API_TOKEN to a token from `bexp token create`"]
            return CommandError(code, *error.lines(), *(hint if error.status == HTTPStatus.UNAUTHORIZED else []))
        case WorkerEndedError():  # status 2: a --device that cannot be used
            code = ExitCode.USAGE if error.status == ExitCode.USAGE else ExitCode.SERVICE
            return CommandError(code, *str(error).splitlines())
        case ModuleNotFoundError() if (missing := (error.name or "").partition(".")[0]) in _EXTRAS:
            reason = f"this command needs {missing}, which is missing: pip install 'bexp[{_EXTRAS[missing]}]'"
            return CommandError(ExitCode.USAGE, reason)
        case ServiceError():
            return CommandError(ExitCode.SERVICE, *str(error).splitlines())
    return None


def _describe_problem(problem: Problem) -> str:
    """Return one line for a person, which names a field by the command's option for it."""
    field, separator, rest = describe_problem(problem).partition(": ")
    return f"{field}{' (--seq-length)' if field == 'hf_seq_length' else ''}{separator}{rest}"
