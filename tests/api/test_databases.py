"""One way through the service on each database."""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa

from bexp.api.background import TERM
from bexp.api.examples import REQUEST
from bexp.api.settings import ServiceSettings
from bexp.storage.database import Database
from bexp.storage.jobs import JobState
from bexp.storage.leaders import HOUSEKEEPER, hold_role
from bexp.storage.queue import Queue
from bexp.storage.schema import VERSION_TABLE, latest_revision
from bexp.storage.tables import leaders
from tests.api.problems import assert_problem
from tests.api.serving import in_process
from tests.contracts.samples import make_progress, make_report, make_worker
from tests.waits import wait_until


def test_a_way_through_the_service(database_url: str, open_url: Callable[[str], Database]) -> None:
    queue = Queue(open_url(database_url))
    settings = ServiceSettings(database_url, poll_seconds=0.02)
    with in_process(settings, raise_server_exceptions=False) as client:
        assert client.get("/readyz").status_code == 200
        headers = {"Idempotency-Key": "once"}
        here = client.post("/v1/explorations", json=REQUEST, headers=headers).headers["Location"]
        assert client.post("/v1/explorations", json=REQUEST, headers=headers).headers["Location"] == here
        assert client.post("/v1/explorations", json=REQUEST | {"seed": 1}, headers=headers).status_code == 422
        client.post("/v1/explorations", json=REQUEST)

        fingerprint = make_report().hardware.fingerprint
        claim = queue.claim(make_worker("worker", fingerprint=fingerprint))
        assert claim is not None
        assert here.endswith(claim.job.id)
        queue.record(claim.lease, make_progress(0))
        queue.finish(claim.lease, JobState.SUCCEEDED)

        assert client.get(here).json()["state"] == "succeeded"
        assert client.get(f"{here}/recommendation").json()["recommendation"]["confidence"] == 45
        assert len(client.get(f"{here}/trials").json()["items"]) == 1
        assert client.get(f"{here}/events").text.count("\ndata: ") == 4
        assert client.get(f"{here}/log?follow=true").text.count("\n") == 4
        assert 'bexp_jobs{state="succeeded"} 1.0' in client.get("/metrics").text

        page = client.get("/v1/explorations?limit=1").json()
        last = client.get("/v1/explorations", params={"cursor": page["next_cursor"]}).json()
        assert [item["links"]["self"] for item in last["items"]] == [here]
        # PostgreSQL takes no NUL and no number beyond its columns.
        for path, status in [
            ("/v1/explorations/%00", 404),
            ("/v1/explorations?cursor=%00", 422),
            ("/v1/explorations?model=%00", 422),
            (f"/v1/explorations?model={'a' * 129}", 422),
            ("/v1/explorations?label=a%3D%00", 422),
            ("/v1/audit?owner=%00", 422),
            (f"/v1/audit?owner={'a' * 65}", 422),
            (f"/v1/audit?cursor={1 << 63}", 422),
            (f"/v1/audit?cursor={(1 << 63) - 1}", 200),
            (f"{here}/trials?cursor={1 << 31}", 422),
            (f"{here}/trials?cursor={(1 << 31) - 1}", 200),
            (f"{here}/log?after={1 << 31}", 422),
            (f"{here}/events?after={(1 << 31) - 1}", 204),
        ]:
            assert client.get(path).status_code == status, path
        for document in (REQUEST | {"model": REQUEST["model"] | {"name": "a\0b"}}, REQUEST | {"a\0b": 1}):
            assert client.post("/v1/explorations", json=document).status_code == 422


def test_a_service_takes_no_changes_after_a_later_version_has_upgraded_the_database(
    database_url: str, open_url: Callable[[str], Database]
) -> None:
    database = open_url(database_url)
    settings = ServiceSettings(database_url, waiting_check_seconds=0.02)
    with in_process(settings) as client:
        here = client.post("/v1/explorations", json=REQUEST).headers["Location"]
        with database.begin() as connection:
            connection.execute(sa.text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
            connection.execute(sa.delete(leaders))
        wait_until(lambda: client.post(f"{here}/cancel").status_code == 503)
        refused = client.post("/v1/explorations", json=REQUEST)
        assert_problem(refused, 503)
        assert refused.json()["type"] == "urn:bexp:problem:schema-not-current"
        assert client.get(here).status_code == client.get("/healthz").status_code == 200
        assert client.get("/readyz").status_code == 503
    assert hold_role(database, HOUSEKEEPER, "of the later version", TERM)


def test_a_service_is_not_ready_with_the_schema_of_an_earlier_version(
    database_url: str, open_url: Callable[[str], Database]
) -> None:
    database = open_url(database_url)
    with in_process(ServiceSettings(database_url)) as client:
        for revision, status in (("0000", 503), (f"{latest_revision()[:2]}99", 200), (latest_revision(), 200)):
            with database.begin() as connection:
                connection.execute(sa.text(f"UPDATE {VERSION_TABLE} SET version_num = '{revision}'"))
            assert client.get("/readyz").status_code == status, revision
