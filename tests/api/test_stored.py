"""Explorations in a database, without a service."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
from fastapi.testclient import TestClient

from bexp.api import stored
from bexp.client.errors import ProblemError
from bexp.client.explorations import Exploration
from bexp.explorer.records.event import EventCode, Progress
from bexp.explorer.records.recommendation import Answer, VariantAnswer
from bexp.storage.database import Database
from bexp.storage.events import read_events
from bexp.storage.jobs import JobState
from bexp.storage.leases import Lease
from bexp.storage.queue import Queue
from tests.contracts.samples import make_recommendation, make_request

BEST = make_recommendation(8)


def test_who_follows_hears_of_each_look_that_finds_nothing_new(
    sqlite_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "POLL_SECONDS", 0.0)
    job, _ = Queue(sqlite_database).enqueue(make_request())
    looks, idle = itertools.count(), list[None]()
    events = stored.StoredExplorations(sqlite_database).events(
        job.id, on_idle=lambda: idle.append(None), cancelled=lambda: next(looks) == 4
    )
    assert [event.code for event in events] == [EventCode.QUEUED]
    assert len(idle) == 3


def test_a_log_of_several_pages_is_read_to_its_end(sqlite_database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "read_events", partial(read_events, limit=1))
    queue = Queue(sqlite_database)
    job, _ = queue.enqueue(make_request())
    queue.request_cancel(job.id)
    explorations = stored.StoredExplorations(sqlite_database)
    assert [event.seq for event in explorations.events(job.id)] == [1, 2]
    assert [event.seq for event in explorations.events(job.id, after=1)] == [2]
    assert [event.seq for event in explorations.stored_events(job.id)] == [1, 2]


def test_what_is_submitted_is_as_a_service_stores_it(sqlite_database: Database, client: TestClient) -> None:
    request = make_request()
    stored.StoredExplorations(sqlite_database).submit(request)
    client.post("/v1/explorations", json=request.model_dump(mode="json", exclude_defaults=True) | {"fresh": True})
    here, there = client.get("/v1/explorations").json()["items"]
    assert {name for name in here if here[name] != there[name]} <= {"id", "created_at", "links", "queue"}


def test_a_refusal_is_the_problem_that_a_service_answers_with(sqlite_database: Database, client: TestClient) -> None:
    with pytest.raises(ProblemError) as refused:
        stored.StoredExplorations(sqlite_database).get("none")
    answered = client.get("/v1/explorations/none").json()
    del answered["instance"]  # the path that was asked for
    assert refused.value.problem == answered


def test_an_exploration_is_one_whoever_reads_it(sqlite_database: Database, client: TestClient, lease: Lease) -> None:
    """Here and from a service; its answer is a part of it, also as `bexp.apply` reads it."""
    queue, here = Queue(sqlite_database), stored.StoredExplorations(sqlite_database)
    path = f"/v1/explorations/{lease.job_id}"
    for answer in (None, Answer(variants=(VariantAnswer(num_query_groups=4, num_parameters=1, recommendation=BEST),))):
        if answer is None:
            queue.record(lease, Progress(recommendation=BEST))
        else:
            queue.finish(lease, JobState.SUCCEEDED, answer=answer)
        known = here.get(lease.job_id)
        there = client.get(path).json()
        assert known.model_dump(mode="json") == there
        assert Exploration.model_validate(there) == known
        assert [each.model_dump(mode="json") for each in here.list()] == client.get("/v1/explorations").json()["items"]
        of_answer = client.get(f"{path}/recommendation").json()
        assert there["text"]["rows"]
        assert {name: of_answer[name] for name in of_answer if name in there} == {
            name: there[name] for name in of_answer if name in there
        }
    assert [each.model_dump(mode="json") for each in here.workers()] == client.get("/v1/workers").json()["items"]
