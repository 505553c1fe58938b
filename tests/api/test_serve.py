from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from typer.testing import CliRunner

from bexp.api import serve as api_serve
from bexp.api.cli import app
from bexp.api.examples import REQUEST
from bexp.api.listener import ListenError, OneLineFormatter, RateFilter, Server, bind
from bexp.api.serve import HOW_TO_ADMIT
from bexp.api.settings import Limits, ServiceSettings
from bexp.storage.database import open_database
from bexp.storage.tokens import create_token
from tests.api.forked import forked
from tests.waits import PATIENCE_SECONDS

SCRIPT = """\
import gc, sys
from bexp.api.serve import serve
from bexp.api.settings import Limits, ServiceSettings
host, url = sys.argv[1:]
def tell(url):
    print(url, gc.get_freeze_count(), sys.getswitchinterval(), sep="\\n", flush=True)
serve(ServiceSettings(url), host, 0, on_ready=tell)
"""


@contextmanager
def started(host: str, database_url: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A service in a process of its own, and the URL that it announced."""
    command = [sys.executable, "-W", "error", "-c", SCRIPT, host, database_url]
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root, env=dict(os.environ)
    ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_a_service_makes_its_database_says_where_it_is_and_stops_when_told(tmp_path: Path) -> None:
    with started("127.0.0.1", f"sqlite:///{tmp_path / 'new' / 'bexp.db'}") as (process, url):
        assert process.stdout is not None
        frozen, switched = (float(process.stdout.readline()) for _ in range(2))
        assert frozen > 10_000, "a collection goes through all that was imported, and holds all requests up"
        assert switched < 0.001, "a thread that computes holds all requests up"
        ready = httpx.get(f"{url}/readyz")
        assert (ready.json(), "Server" in ready.headers) == ({"status": "ready"}, False)
        job_id = httpx.post(f"{url}/v1/explorations", json=REQUEST).json()["id"]
        with httpx.stream(
            "GET", f"{url}/v1/explorations/{job_id}/log?follow=true", timeout=PATIENCE_SECONDS
        ) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("BEXP101")
            process.terminate()
            assert [line for line in lines if not line.startswith("BEXP1")] == []
        _, stderr = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0
        assert stderr == ""


@pytest.mark.slow(together="services")
def test_beyond_loopback_tokens_are_required_and_their_absence_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database_url = f"sqlite:///{tmp_path / 'bexp.db'}"
    with forked("serve", "--host", "0.0.0.0", BEXP_DATABASE_URL=database_url) as service:
        local = service.url.replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{local}/healthz").status_code == 200
        assert httpx.get(f"{local}/v1/explorations").status_code == 401
        monkeypatch.setenv("BEXP_API_URL", local)
        monkeypatch.delenv("BEXP_API_TOKEN", raising=False)
        refused = CliRunner().invoke(app, ["list"])
        assert refused.exit_code == 2
        assert "BEXP_API_TOKEN" in refused.stderr
        database = open_database(database_url)
        monkeypatch.setenv("BEXP_API_TOKEN", create_token(database, "test"))
        database.dispose()
        assert CliRunner().invoke(app, ["list", "--json"]).stdout == "[]\n"
        assert service.end(signal.SIGINT) == (0, "")
    assert service.said.strip() == HOW_TO_ADMIT


@pytest.mark.parametrize(
    ("host", "proxies", "is_required", "url"),
    [
        ("127.0.0.1", (), False, r"http://127\.0\.0\.1:\d+"),
        ("127.0.0.1", (4711,), True, r"http://127\.0\.0\.1:\d+"),
        ("0.0.0.0", (), True, r"http://0\.0\.0\.0:\d+"),
        ("::1", (), False, r"http://\[::1\]:\d+"),
    ],
)
def test_tokens_are_required_beyond_loopback_and_behind_a_proxy(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch, host: str, proxies: tuple[int, ...], is_required: bool, url: str
) -> None:
    required, urls, said = list[bool](), list[str](), list[str]()

    def listen(_: socket.socket, settings: ServiceSettings, *__: Any, on_ready: Callable[[], None], **___: Any) -> None:
        required.append(settings.require_token)
        on_ready()

    monkeypatch.setattr(api_serve, "listen", listen)
    settings = ServiceSettings(sqlite_url, trusted_proxies=proxies)
    api_serve.serve(settings, host, 0, on_ready=urls.append, notify=said.append)
    assert (required, said) == ([is_required], [HOW_TO_ADMIT] if is_required else [])
    assert re.fullmatch(url, urls[0])


@pytest.mark.parametrize(
    ("signals", "is_forced"),
    [("INT", False), ("INT INT", True), ("TERM", False), ("TERM TERM", False), ("TERM INT", True)],
)
def test_a_second_interrupt_waits_for_no_request(signals: str, is_forced: bool) -> None:
    server = Server(FastAPI(), Limits())
    for name in signals.split():
        server.handle_exit(signal.Signals[f"SIG{name}"], None)
    assert (server.should_exit, server.force_exit) == (True, is_forced)


def test_an_address_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=f"127.0.0.1:{port}"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "a" * 300])
def test_a_host_that_is_not_here_is_named(host: str) -> None:
    with pytest.raises(ListenError, match=host) as refused:
        bind(host, 0)
    assert ("not a host" in str(refused.value)) is (len(host) == 300), "else the system says why"


def test_a_process_that_fails_all_the_time_writes_fifty_lines_and_then_ten_a_second() -> None:
    clock = SimpleNamespace(now=100.0)
    limit = RateFilter(clock=lambda: clock.now)

    def written(count: int) -> list[str]:
        records = [logging.LogRecord("bexp", logging.ERROR, "", 0, "oh %d", (number,), None) for number in range(count)]
        return [record.getMessage() for record in records if limit.filter(record)]

    assert len(written(60)) == 50
    clock.now += 0.05
    assert written(3) == []
    clock.now += 0.95
    after = written(20)
    assert (after[:2], len(after)) == (["oh 0 (13 lines before this one were left out)", "oh 1"], 10)
    clock.now += 3600
    assert len(written(60)) == 50, "what is not used is not kept"


def test_an_exception_is_one_line_with_its_innermost_frames_first() -> None:
    def fail(depth: int) -> None:
        if depth:
            fail(depth - 1)
        raise ValueError("oh\nno")

    try:
        fail(10)
    except ValueError:
        record = logging.LogRecord("bexp", logging.ERROR, "", 0, "it %s", ("failed",), sys.exc_info())
    line = OneLineFormatter().format(record)
    assert line.startswith(f"error: it failed: ValueError: oh no [{__file__}:")
    assert (line.count(" < "), line.count(" fail"), line[-1]) == (5, 7, "]")
    record.msg = "%s" + "x" * 5000
    assert len(OneLineFormatter().format(record)) == 2000
