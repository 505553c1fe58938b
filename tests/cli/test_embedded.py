"""The embedded service: it says why it does not start, and never outlives its command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from bexp.api.client import Client, ServiceError
from bexp.api.embedded import Child, EmbeddedService
from bexp.explorer.records.event import EventCode
from bexp.storage.database import Database
from bexp.storage.jobs import JobState, get_job
from tests.cli.samples import REQUEST

COMMAND = """
import os, sys, time
from bexp.api.client import Client
from bexp.api.embedded import EmbeddedService
from bexp.explorer.spec.request import ExplorationRequest
with EmbeddedService(sys.argv[1], with_worker=False) as service, Client(service.url) as client:
    job = client.submit(ExplorationRequest.model_validate_json(sys.stdin.read()))
    service.adopt(job.id)
    print(job.id, flush=True)
    time.sleep(60)
"""


def await_gone(processes: list[psutil.Process], seconds: float) -> None:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    assert not alive


def await_output(child: Child) -> str:
    deadline = time.monotonic() + 60
    while not (output := child.log.read_text()).endswith("\n"):
        assert time.monotonic() < deadline, "the child says nothing"
        time.sleep(0.02)
    return output


def test_entering_serves_and_leaving_ends_it(sqlite_url: str) -> None:
    others = psutil.Process().children()
    with EmbeddedService(sqlite_url, with_worker=False) as service:
        logs = service.log_directory
        children = [child for child in psutil.Process().children() if child not in others]
        assert children
        with Client(service.url) as client:
            assert client.list().jobs == ()
    with Client(service.url) as client:
        assert not client.is_alive()
    await_gone(children, 0)
    assert not logs.exists()


def test_a_job_that_nobody_can_run_is_told_so(sqlite_url: str) -> None:
    with EmbeddedService(sqlite_url, with_worker=False) as service, Client(service.url) as client:
        job = client.submit(REQUEST)
        waiting = next(event for event in client.events(job.id) if event.code is EventCode.WAITING)
        assert "none is running" in waiting.message


def test_a_service_that_cannot_start_says_why_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "junk").write_text("junk")
    for url, cause in (
        ("sqlite:////proc/bexp/bexp.db", "opened: No such file or directory: /proc/bexp"),
        (f"sqlite:///{tmp_path / 'junk'}", "used: file is not a database"),
    ):
        with (
            pytest.raises(ServiceError, match=f"^the embedded API ended: the database cannot be {cause}$"),
            EmbeddedService(url, with_worker=False),
        ):
            pass


def test_a_killed_command_leaves_no_process_and_cancels_its_exploration(
    sqlite_url: str, open_url: Callable[[str], Database]
) -> None:
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND, sqlite_url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert command.stdin is not None
    assert command.stdout is not None
    with command.stdin, command.stdout:
        command.stdin.write(REQUEST.model_dump_json())
        command.stdin.close()
        job_id = command.stdout.readline().strip()
        children = psutil.Process(command.pid).children(recursive=True)
        assert children
        command.kill()
        command.wait()
    await_gone(children, 60)
    assert get_job(open_url(sqlite_url), job_id).state is JobState.CANCELLED


def test_ending_a_child_ends_its_group(tmp_path: Path) -> None:
    script = "trap 'exit 0' TERM; sleep 60 & echo $!; while true; do sleep 0.1; done"
    child = Child("shell", ["bash", "-c", script], tmp_path / "log", environment=dict(os.environ))
    grandchild = psutil.Process(int(await_output(child)))
    child.check()
    child.ask_to_end()
    child.end(60.0)
    await_gone([grandchild], 60)
    with pytest.raises(ServiceError, match="the embedded shell ended with status 0"):
        child.check()


def test_a_child_that_ignores_the_request_is_killed(tmp_path: Path) -> None:
    script = "trap '' TERM; echo trapped; sleep 60"
    child = Child("shell", ["bash", "-c", script], tmp_path / "log", environment=dict(os.environ))
    process = psutil.Process(child.pid)
    await_output(child)
    child.ask_to_end()
    child.end(0.3)
    assert not process.is_running()
    with pytest.raises(ServiceError, match=signal.SIGKILL.name):
        child.check()
