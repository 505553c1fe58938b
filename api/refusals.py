"""Refusals of a request and their reasons: the same over REST and in a command that works in the database."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field

from bexp.client.address import exploration_path
from bexp.client.explorations import NO_RECOMMENDATION, NOT_FINISHED
from bexp.explorer.formats.document import FormatError
from bexp.explorer.trainers.document import ExportError
from bexp.explorer.trainers.registry import UnknownFormatError
from bexp.storage.jobs import JobNotFoundError
from bexp.storage.pruning import JobNotFinishedError
from bexp.storage.quotas import QueuedQuotaError, StoredQuotaError
from bexp.storage.run_reports import NoAnswerError, TooManyReportsError
from bexp.storage.schema import NewerSchemaError
from bexp.storage.submission import IdempotencyConflictError, JobFinishedError

MAX_ERRORS = 100
MAX_MESSAGE = 500
QUEUED_RETRY_SECONDS = 30
OUTDATED = "A later version of this service has upgraded the database; this process takes no changes."


class FieldError(BaseModel):
    """A field and the rule that it breaks; without `field` and `pointer` (RFC 6901), the whole document breaks it."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=False)

    field: str | None = None
    pointer: Annotated[str | None, Field(description="Where the field is in the body.")] = None
    message: str


class Problem(BaseModel):
    """Problem details for HTTP APIs (RFC 9457)."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str | None = None
    instance: str | None = None
    errors: list[FieldError] | None = None

    @classmethod
    def of(
        cls,
        status: int,
        detail: str | None,
        *,
        name: str | None = None,
        errors: list[FieldError] | None = None,
        instance: str | None = None,
    ) -> Self:
        """Return the document; `name` makes its type, which is `about:blank` without a name."""
        return cls(
            type=f"urn:bexp:problem:{name}" if name else "about:blank",
            title=HTTPStatus(status).phrase,
            status=status,
            detail=detail,
            instance=instance,
            errors=errors or None,
        )


class ProblemException(Exception):  # noqa: N818 - it is a response, not a fault
    """Refuses a request with a problem document."""

    def __init__(
        self,
        status: HTTPStatus,
        detail: str,
        *,
        name: str | None = None,
        errors: Iterable[FieldError] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.name = name
        self.errors = list(errors)[:MAX_ERRORS]
        self.headers = headers


def invalid_body(
    errors: Iterable[tuple[tuple[str | int, ...], str]], detail: str = "The request is not one that can be explored."
) -> ProblemException:
    """Return a 422 for a body that breaks rules; each error has the location of the field in the body."""
    return ProblemException(
        HTTPStatus.UNPROCESSABLE_ENTITY,
        detail,
        name="invalid-request",
        errors=[_body_error(location, message) for location, message in errors],
    )


def invalid_parameter(name: str, message: str) -> ProblemException:
    """Return a 422 for a query parameter or a header."""
    return ProblemException(
        HTTPStatus.UNPROCESSABLE_ENTITY,
        f"{name}: {message}",
        name="invalid-parameter",
        errors=[FieldError(field=name, message=message)],
    )


Refuse = Callable[[], ProblemException]


def database_unavailable() -> ProblemException:
    """Return the 503 while the database does not do its work."""
    return ProblemException(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "The database does not answer as it should; /readyz and the service's log say more.",
        name="database-unavailable",
        headers={"Retry-After": "2"},
    )


def refusal_of(error: Exception) -> ProblemException | None:
    """Return the refusal of a request that raised `error`; None if the error is no refusal."""
    match error:
        case ProblemException():
            return error
        case FormatError():
            return invalid_body(error.errors)
        case JobNotFoundError():
            detail = "There is no exploration with this id."
            return ProblemException(HTTPStatus.NOT_FOUND, detail, name="unknown-exploration")
        case JobFinishedError():
            return ProblemException(HTTPStatus.CONFLICT, f"{error}.", name="finished")
        case JobNotFinishedError():
            detail = (
                f"The exploration is {error.state}: end it first with POST {exploration_path(error.job_id)}/cancel."
            )
            return ProblemException(HTTPStatus.CONFLICT, detail, name=NOT_FINISHED)
        case IdempotencyConflictError():
            detail = "This Idempotency-Key was used before with a different request."
            conflict = FieldError(field="Idempotency-Key", message="was used before with a different request")
            return ProblemException(
                HTTPStatus.UNPROCESSABLE_ENTITY, detail, name="idempotency-conflict", errors=[conflict]
            )
        case QueuedQuotaError():
            detail = (
                f"Owner '{error.owner}' has as many queued explorations as its quota 'queued' allows ({error.limit})."
            )
            retry = {"Retry-After": str(QUEUED_RETRY_SECONDS)}
            return ProblemException(HTTPStatus.TOO_MANY_REQUESTS, detail, name="quota-exceeded", headers=retry)
        case StoredQuotaError():
            detail = (
                f"The explorations of owner '{error.owner}' take {error.stored / 1e6:,.1f} MB, and its quota 'stored' "
                f"is {error.limit / 1e6:,g} MB. Delete finished ones: DELETE /v1/explorations/{{id}}, "
                "`bexp delete ID`, or `bexp prune` where the database is."
            )
            return ProblemException(HTTPStatus.FORBIDDEN, detail, name="quota-exceeded")
        case NewerSchemaError():
            retry = {"Retry-After": "30"}
            return ProblemException(HTTPStatus.SERVICE_UNAVAILABLE, OUTDATED, name="schema-not-current", headers=retry)
        case UnknownFormatError():
            return invalid_parameter("format", str(error))
        case ExportError():
            return ProblemException(HTTPStatus.CONFLICT, str(error), name=NO_RECOMMENDATION)
        case NoAnswerError():
            detail = "The exploration has recommended nothing that a run could have followed."
            return ProblemException(HTTPStatus.CONFLICT, detail, name=NO_RECOMMENDATION)
        case TooManyReportsError():
            return ProblemException(HTTPStatus.CONFLICT, f"The {error}.", name="too-many-run-reports")
    return None


REFUSED = (
    FormatError,
    JobNotFoundError,
    JobFinishedError,
    JobNotFinishedError,
    IdempotencyConflictError,
    QueuedQuotaError,
    StoredQuotaError,
    NewerSchemaError,
    UnknownFormatError,
    ExportError,
    NoAnswerError,
    TooManyReportsError,
)
"""The errors that `refusal_of` knows."""


def _body_error(location: tuple[str | int, ...], message: str) -> FieldError:
    parts = [readable(str(part), 64) for part in location]
    if not parts:
        return FieldError(message=readable(message, MAX_MESSAGE))
    pointer = "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in parts)
    return FieldError(field=".".join(parts), pointer=f"#{pointer}", message=readable(message, MAX_MESSAGE))


def readable(text: str, limit: int) -> str:
    """Return `text` without control characters and lone surrogates, at most `limit` characters."""
    cleaned = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[: limit + 1])
    return cleaned if len(cleaned) <= limit else cleaned[: limit - 1] + "\N{HORIZONTAL ELLIPSIS}"
