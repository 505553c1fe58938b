"""The route that resumes an exploration."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter, Depends

from bexp.api import examples
from bexp.api.auth import Submitter
from bexp.api.negotiation import accepts_json
from bexp.api.resources import exploration_of
from bexp.api.routes.explorations import JobIdDep
from bexp.api.service import ServiceDep
from bexp.client.address import exploration_path
from bexp.client.explorations import Exploration
from bexp.storage.owners import Scope
from bexp.storage.submission import JobFinishedError

router = APIRouter(
    prefix="/v1/explorations/{exploration_id}", tags=["explorations"], dependencies=[Depends(accepts_json)]
)


@router.post(
    "/resume",
    status_code=HTTPStatus.ACCEPTED,
    summary="Resume an exploration that was cancelled or has failed",
    responses={
        202: examples.example(examples.QUEUED, description="It waits for a worker, or one runs it"),
        **examples.problems(f"{exploration_path(examples.JOB_ID)}/resume", HTTPStatus.NOT_FOUND),
        **examples.problems(
            f"{exploration_path(examples.JOB_ID)}/resume",
            HTTPStatus.CONFLICT,
            type="urn:bexp:problem:finished",
            detail=f"{JobFinishedError(examples.JOB_ID)}.",
        ),
    },
)
def resume_exploration(job_id: JobIdDep, service: ServiceDep, caller: Submitter) -> Exploration:
    """Queue an exploration again. It goes on where it stopped; no stored trial is measured again.

    An exploration that waits or runs does not change, so the call can be repeated.
    """
    job = service.queue.resume(job_id, by=caller)
    return exploration_of(job, with_results=caller.may(Scope.READ))
