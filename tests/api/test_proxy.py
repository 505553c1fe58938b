"""The reverse proxy of deploy/nginx.conf, before a service. It is skipped where nginx is not installed."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from bexp.api.examples import REQUEST
from bexp.api.settings import ServiceSettings
from bexp.storage.audit import read_audit
from bexp.storage.database import Database
from bexp.storage.queue import Queue
from bexp.storage.tokens import create_token
from tests.api.serving import Served
from tests.chaos.processes import reserve
from tests.contracts.samples import make_request
from tests.waits import PATIENCE_SECONDS, wait_until

CONFIGURATION = Path(__file__).parents[2] / "deploy" / "nginx.conf"
NGINX, OPENSSL = shutil.which("nginx"), shutil.which("openssl")

pytestmark = pytest.mark.skipif(None in (NGINX, OPENSSL), reason="needs nginx and openssl")


@dataclass
class Proxy:
    """A running proxy, a client of it with a token, and the port that it listens on."""

    client: httpx.Client
    port: int


@pytest.fixture
def reserved() -> Iterator[socket.socket]:
    """A socket with a port that the system gives to nobody else, and that the proxy may listen on."""
    with reserve() as bound:
        yield bound


def is_open(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def proxy(
    serve: Callable[[ServiceSettings], Served],
    settings: ServiceSettings,
    sqlite_database: Database,
    tmp_path: Path,
    reserved: socket.socket,
) -> Iterator[Proxy]:
    served = serve(replace(settings, require_token=True, trusted_proxies=(os.geteuid(),)))
    key = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=localhost")
    names = ("-addext", "subjectAltName=DNS:localhost")
    files = ("-keyout", tmp_path / "bexp.key", "-out", tmp_path / "bexp.crt")
    subprocess.run(["openssl", *key, *names, *files], check=True, capture_output=True)
    port = reserved.getsockname()[1]
    text = CONFIGURATION.read_text()
    for stated, here in (
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("127.0.0.1:8642", urlsplit(served.url).netloc),
        ("/etc/nginx/", f"{tmp_path}/"),
        ("client_header_timeout 10s", "client_header_timeout 1s"),
        ("rate=20r/s", "rate=1r/s"),
        ("user www-data;", "user root;"),
        ("server_tokens off;", "server_tokens off; access_log off; client_body_temp_path body; proxy_temp_path proxy;"),
    ):
        assert text.count(stated) >= 1, stated
        text = text.replace(stated, here)
    path = tmp_path / "nginx.conf"
    path.write_text(text)
    options = "daemon off; pid nginx.pid;"
    log = tmp_path / "error.log"
    with subprocess.Popen(["nginx", "-p", tmp_path, "-e", log, "-c", path, "-g", options]) as process:
        try:
            wait_until(lambda: is_open(port) or process.poll() is not None)
            assert process.poll() is None, log.read_text()
            headers = {"Authorization": f"Bearer {create_token(sqlite_database, 'proxy')}"}
            context = ssl.create_default_context(cafile=tmp_path / "bexp.crt")
            with httpx.Client(base_url=f"https://localhost:{port}", verify=context, headers=headers) as client:
                yield Proxy(client, port)
        finally:
            process.terminate()


def test_the_proxy_passes_requests_and_streams_and_holds_back_floods(proxy: Proxy, queue: Queue) -> None:
    assert proxy.client.get("/readyz").json() == {"status": "ready"}
    assert proxy.client.get("/v1/explorations", headers={"Authorization": ""}).status_code == 401
    forged = {"X-Forwarded-For": "192.0.2.66"}
    here = proxy.client.post("/v1/explorations", json=REQUEST, headers=forged).headers["Location"]
    assert [record.origin for record in read_audit(queue.database) if record.action == "submit"] == ["127.0.0.1"]
    assert proxy.client.post("/v1/explorations", content=b"{" * 300_000).status_code in {413, 415}

    job, _ = queue.enqueue(make_request())
    with proxy.client.stream("GET", f"/v1/explorations/{job.id}/log?follow=true", timeout=PATIENCE_SECONDS) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("BEXP101")  # it comes through while the exploration goes on
        threading.Thread(target=queue.request_cancel, args=(job.id,)).start()
        assert [line[:7] for line in lines] == ["BEXP404"]

    with socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE_SECONDS) as silent:
        assert silent.recv(1) == b""

    answers = [proxy.client.get(here) for _ in range(90)]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused
    assert {answer.status_code for answer in answers} == {200, 429}
    assert refused[0].headers["Retry-After"] == "2"
    assert refused[0].json()["title"] == "Too Many Requests"
