"""A service of its own processes: `bexp serve`, `bexp worker`, and those who submit, watch, cancel and kill."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from datetime import timedelta

import httpx
import psutil
import pytest
import sqlalchemy as sa

from api.client import Client
from explorer.records.event import EventCode, render_line
from storage.database import open_database
from storage.tables import jobs
from tests.acceptance.conftest import Machine, await_gone, profilers_of, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture
def url(machine: Machine) -> str:
    """A running API, which later commands of the machine use."""
    server = machine.start("serve", "--port", "0")
    wait_for(lambda: "serving http" in machine.err(server), 30, "the API's start")
    found = re.search(r"http://\S+", machine.err(server))
    assert found is not None
    machine.environment["BEXP_API_URL"] = found[0]
    return found[0]


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url) as client:
        yield client


def num_trials(client: Client, job_id: str) -> int:
    return len(client.trials(job_id))


def start_worker(machine: Machine) -> subprocess.Popen[str]:
    worker = machine.start("worker", "--device", "cpu")
    wait_for(lambda: "is ready" in machine.err(worker), 40, "the worker's start")
    return worker


def run_out_lease(machine: Machine, job_id: str) -> None:
    """Let the time pass that a lost worker's lease still has to run."""
    database = open_database(machine.database_url)
    with database.begin() as connection:
        past = sa.update(jobs).where(jobs.c.id == job_id).values(lease_expires_at=database.clock(timedelta(seconds=-1)))
        connection.execute(past)
    database.dispose()


def test_submit_watch_and_resume_the_stream(machine: Machine, url: str, client: Client) -> None:
    job_id = machine.run("submit", machine.configure()).strip()
    worker = start_worker(machine)
    watched = machine.run("watch", job_id)
    events = list(client.events(job_id))
    lines = [render_line(event) for event in events]
    assert watched.partition("\n\n")[0].splitlines() == lines
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert events[-1].code is EventCode.SUCCEEDED

    headers = {"Accept": "text/event-stream", "Last-Event-ID": "3"}
    stream = httpx.get(f"{url}/v1/explorations/{job_id}/events", headers=headers, timeout=10).text
    assert re.findall(r"^id: ?(\d+)$", stream, re.MULTILINE) == [str(event.seq) for event in events[3:]]
    assert list(client.events(job_id, after=3)) == events[3:]
    assert httpx.get(f"{url}/v1/explorations/{job_id}/log?follow=true").text.splitlines() == lines

    best = int(machine.run("best", job_id))
    assert json.loads(machine.run("best", job_id, "--json"))["recommendation"]["candidate"]["micro_batch_size"] == best
    profilers = profilers_of(psutil.Process(worker.pid))
    worker.terminate()
    assert worker.wait(15) == 0
    await_gone(profilers, 2)


def test_beyond_loopback_a_token_is_asked_for(machine: Machine) -> None:
    server = machine.start("serve", "--host", "0.0.0.0", "--port", "0")
    wait_for(lambda: "serving http" in machine.err(server), 30, "the API's start")
    port = machine.err(server).split(":")[-1].strip()
    machine.environment["BEXP_API_URL"] = f"http://127.0.0.1:{port}"
    refused = machine.start("list")
    assert refused.wait(20) == 2
    assert "BEXP_API_TOKEN" in machine.err(refused)
    machine.environment["BEXP_API_TOKEN"] = machine.run("token", "create", "me").strip()
    assert machine.run("list", "--json") == "[]\n"
    server.terminate()
    assert server.wait(15) == 0


def test_a_killed_worker_is_replaced_and_a_cancelled_job_stops(machine: Machine, client: Client) -> None:
    budget = {"max_seconds": 40, "confidence_target": 99}
    config = machine.configure(micro_batch_size="explore", bta={}, budget=budget, fresh=True)
    job_id = machine.run("submit", config, "--device", "cpu").strip()
    first = start_worker(machine)
    wait_for(lambda: num_trials(client, job_id) >= 2, 40, "two trials")
    profilers = profilers_of(psutil.Process(first.pid))
    assert profilers
    first.kill()
    first.wait()
    await_gone(profilers, 5)
    before = client.trials(job_id)
    run_out_lease(machine, job_id)

    second = start_worker(machine)
    wait_for(lambda: num_trials(client, job_id) >= len(before) + 2, 40, "two more trials")
    asked = time.monotonic()
    machine.run("cancel", job_id)
    wait_for(lambda: client.get(job_id).state == "cancelled", 5 - (time.monotonic() - asked), "the cancellation")

    trials = client.trials(job_id)
    assert trials[: len(before)] == before
    assert [trial.number for trial in trials] == list(range(len(trials)))
    measured = [part.component for trial in trials for part in trial.measurement.components]
    assert len(measured) == len(set(measured))
    events = list(client.events(job_id))
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    codes = [event.code for event in events]
    assert codes.count(EventCode.STARTED) == 1
    assert EventCode.RESUMED in codes
    assert codes[-1] is EventCode.CANCELLED
    told = [e.data["trial"] for e in events if e.code in {EventCode.TRIAL, EventCode.INFEASIBLE} and "trial" in e.data]
    assert told == sorted(set(told))

    watched = machine.start("watch", job_id)
    assert watched.wait(20) == 1
    children = psutil.Process(second.pid).children(recursive=True)
    second.send_signal(signal.SIGINT)
    assert second.wait(15) == 0
    await_gone(children, 2)
