"""The rules of a submission: one function, which the route calls, and a command that works in the database."""

from __future__ import annotations

import re

from bexp.api.refusals import invalid_parameter
from bexp.explorer.formats.document import FormatError
from bexp.explorer.model.target import is_local_target
from bexp.explorer.request.request import ExplorationRequest
from bexp.storage.jobs import Job
from bexp.storage.owners import LOCAL, Caller
from bexp.storage.queue import Queue

_KEY = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]{0,253}[\x21-\x7e])?")


def submit(
    queue: Queue,
    request: ExplorationRequest,
    *,
    idempotency_key: str | None = None,
    priority: int,
    by: Caller = LOCAL,
    job_id: str | None = None,
    own_worker: str = "",
) -> tuple[Job, bool]:
    """Queue an exploration; return its job, and whether it is new. `Queue.enqueue` explains the arguments.

    A target that is a file needs `own_worker`, a worker that the submitter starts on the machine of the file.

    Raises the errors that `bexp.api.refusals.refusal_of` knows.
    """
    if idempotency_key is not None and not _KEY.fullmatch(idempotency_key):
        raise invalid_parameter("Idempotency-Key", "must be 1 to 255 printable ASCII characters")
    if is_local_target(request.target_name) and not own_worker:
        where = "is a file on somebody's machine; `bexp explore` measures it there"
        raise FormatError([(("target",), f"'{request.target_name}' {where}")])
    return queue.enqueue(
        request, idempotency_key=idempotency_key, priority=priority, by=by, job_id=job_id, own_worker=own_worker
    )
