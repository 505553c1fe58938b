"""The workers that measure explorations."""

from __future__ import annotations

from fastapi import APIRouter, Depends

from bexp.api import examples
from bexp.api.auth import Reader
from bexp.api.bodies import accepts_json
from bexp.api.resources import WorkerList, worker_of
from bexp.api.service import ServiceDep
from bexp.storage.workers import read_workers

router = APIRouter(prefix="/v1/workers", tags=["workers"], dependencies=[Depends(accepts_json)])


@router.get("", summary="List the workers", responses={200: examples.example(examples.WORKERS)})
def list_workers(service: ServiceDep, caller: Reader) -> WorkerList:
    """The workers with their devices, versions and state. A lost worker is listed for a day, one that shut down is not.

    An exploration is named only to those who may read it.
    """
    return WorkerList(items=[worker_of(worker) for worker in read_workers(service.database, owner=caller.sees)])
