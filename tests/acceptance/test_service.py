"""A service of its own processes: `bexp serve`, `bexp worker`, and those who submit and watch."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator

import httpx
import psutil
import pytest

from bexp.client.client import Client
from bexp.explorer.records.event import EventCode, render_line
from tests.acceptance.conftest import Machine, await_gone, await_url, profilers_of
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.slow


@pytest.fixture
def url(machine: Machine) -> str:
    """A running API, which later commands of the machine use."""
    machine.environment["BEXP_API_URL"] = found = await_url(machine, machine.start("serve", "--port", "0"))
    return found


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url) as client:
        yield client


def test_submit_watch_and_resume_the_stream(machine: Machine, url: str, client: Client) -> None:
    job_id = machine.run("submit", machine.configure()).strip()
    worker = machine.start("worker", "--device", "cpu")
    watched = machine.run("watch", job_id)
    events = list(client.events(job_id))
    lines = [render_line(event) for event in events]
    assert watched.partition("\n\n")[0].splitlines() == lines
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert events[-1].code is EventCode.SUCCEEDED

    headers = {"Accept": "text/event-stream", "Last-Event-ID": "3"}
    stream = httpx.get(f"{url}/v1/explorations/{job_id}/events", headers=headers, timeout=PATIENCE_SECONDS).text
    assert re.findall(r"^id: ?(\d+)$", stream, re.MULTILINE) == [str(event.seq) for event in events[3:]]
    assert list(client.events(job_id, after=3)) == events[3:]
    assert httpx.get(f"{url}/v1/explorations/{job_id}/log?follow=true").text.splitlines() == lines
    best = json.loads(machine.ask("best", job_id, "--json"))["recommendation"]
    assert best["candidate"]["micro_batch_size"] in {1, 2, 4}

    profilers = profilers_of(psutil.Process(worker.pid))
    worker.send_signal(signal.SIGINT)
    assert worker.wait(PATIENCE_SECONDS) == 0
    await_gone(profilers, 300)
