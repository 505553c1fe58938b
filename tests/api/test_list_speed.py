"""A long list is answered quickly: no stored document is read for it."""

from __future__ import annotations

import time

import sqlalchemy as sa
from fastapi.testclient import TestClient

from storage.leases import Lease
from storage.queue import Queue
from storage.tables import jobs
from tests.contracts.samples import make_progress

LIMIT_SECONDS = 0.03


def test_a_list_of_200_takes_at_most_30_ms_of_cpu_time(client: TestClient, queue: Queue, lease: Lease) -> None:
    queue.record(lease, make_progress(0))
    with queue.database.begin() as connection:
        row = dict(connection.execute(sa.select(jobs)).one()._mapping)
        connection.execute(sa.insert(jobs), [row | {"id": f"{number:016x}"} for number in range(210)])
    seconds = []
    for _ in range(12):
        start = time.process_time()
        response = client.get("/v1/explorations?limit=200")
        seconds.append(time.process_time() - start)
    assert len(response.json()["items"]) == 200
    assert min(seconds) <= LIMIT_SECONDS
