"""Whom a service without tokens serves: its own user, as the kernel knows who is at the other end of a connection."""

from __future__ import annotations

import json
import os
import pwd
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from bexp.api import peers
from bexp.api.examples import REQUEST
from bexp.api.peers import Peer, find_peer, read_proxy
from bexp.api.settings import ServiceSettings
from bexp.storage.audit import read_audit
from bexp.storage.database import Database
from bexp.storage.owners import ALL_SCOPES
from bexp.storage.tokens import create_token
from tests.api.forked import forked
from tests.api.problems import assert_problem
from tests.api.serving import Served, in_process
from tests.waits import PATIENCE_SECONDS

OTHER = 65534
ROOT = Path(__file__).parents[2]
AS_OTHER = """\
import encodings.idna, http.client, json, os, sys  # all that is needed, while the interpreter's files can be read
os.setgroups([])
os.setuid(int(sys.argv[1]))
connection = http.client.HTTPConnection(sys.argv[2])
connection.request(sys.argv[3], "/v1/explorations", body=sys.argv[4] or None, headers=json.loads(sys.argv[5]))
response = connection.getresponse()
print(json.dumps([response.status, json.loads(response.read())]))
"""

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="another user's process needs root")
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says whose a connection is")


def ask_as(uid: int, url: str, headers: dict[str, str] | None = None, body: str = "") -> tuple[int, Any]:
    """Ask for the explorations, or submit `body`, from a process of another user; return status and document."""
    given = {"Content-Type": "application/json", **(headers or {})}
    words = [str(uid), urlsplit(url).netloc, "POST" if body else "GET", body, json.dumps(given)]
    done = subprocess.run(
        [sys.executable, "-c", AS_OTHER, *words], check=True, capture_output=True, timeout=PATIENCE_SECONDS
    )
    status, document = json.loads(done.stdout)
    return status, document


@pytest.fixture
def pair() -> Iterator[Callable[..., tuple[socket.socket, socket.socket]]]:
    with ExitStack() as stack:

        def connect(
            host: str = "127.0.0.1", to: str | None = None, listening: str | None = None
        ) -> tuple[socket.socket, socket.socket]:
            family = socket.AF_INET6 if ":" in (listening or host) else socket.AF_INET
            dual = family == socket.AF_INET6 and listening == "::"
            listener = stack.enter_context(
                socket.create_server((listening or host, 0), family=family, dualstack_ipv6=dual)
            )
            client = stack.enter_context(socket.create_connection((to or host, listener.getsockname()[1])))
            return client, stack.enter_context(listener.accept()[0])

        yield connect


def peer_of(accepted: socket.socket) -> Peer:
    client, server = accepted.getpeername(), accepted.getsockname()
    return find_peer((client[0], client[1]), (server[0], server[1]))


@pytest.mark.slow(together="services")
@linux
@needs_root
def test_a_service_without_tokens_serves_its_user_and_others_with_a_token_or_if_it_is_open(
    sqlite_database: Database,
) -> None:
    secret = create_token(sqlite_database, "theirs", owner="team")
    with forked("serve", BEXP_DATABASE_URL=sqlite_database.url) as service:
        url = service.url
        assert httpx.get(f"{url}/v1/explorations").status_code == 200
        status, document = ask_as(OTHER, url)
        assert status == 401
        assert "`bexp token create`" in document["detail"]
        assert "--open" in document["detail"]
        assert ask_as(OTHER, url, {"Authorization": f"Bearer {secret}"}, json.dumps(REQUEST))[0] == 202
        assert ask_as(OTHER, url, {"Authorization": "Bearer none"})[0] == 401
    (record,) = [record for record in read_audit(sqlite_database) if record.action == "submit"]
    assert (record.owner, record.token, record.origin) == ("team", "theirs", "127.0.0.1")
    with forked("serve", "--open", BEXP_DATABASE_URL=sqlite_database.url) as service:
        assert ask_as(OTHER, service.url)[0] == 200


@pytest.mark.parametrize("uid", [4712, None])
def test_another_user_and_one_that_the_system_does_not_name_need_a_token(
    serve: Callable[[ServiceSettings], Served],
    settings: ServiceSettings,
    monkeypatch: pytest.MonkeyPatch,
    uid: int | None,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    monkeypatch.setattr(peers, "_find_uid", lambda client, server: uid)
    assert_problem(httpx.get(f"{serve(settings).url}/v1/explorations"), 401)
    assert httpx.get(f"{serve(replace(settings, is_open=True)).url}/v1/explorations").status_code == 200


def test_root_is_served(
    serve: Callable[[ServiceSettings], Served], settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    monkeypatch.setattr(peers, "_find_uid", lambda client, server: 0)
    assert httpx.get(f"{serve(settings).url}/v1/explorations").status_code == 200


def test_each_connection_is_looked_up_once(
    serve: Callable[[ServiceSettings], Served], settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, int | None]] = []

    def find(client: object, server: tuple[str, int]) -> int:
        asked.append((client, server[1]))
        return os.geteuid()

    monkeypatch.setattr(peers, "_find_uid", find)
    url = serve(settings).url
    with httpx.Client(base_url=url) as client:
        assert {client.get("/v1/explorations").status_code for _ in range(3)} == {200}
        port = client.base_url.port
    assert [to for _, to in asked].count(port) == 1  # a connection of an earlier test may end only now


@linux
@pytest.mark.parametrize(
    ("host", "to", "listening"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "::ffff:127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1", "::"),
        ("::1", "::1", "::1"),
    ],
)
def test_the_kernel_says_whose_a_connection_is(
    pair: Callable[..., tuple[socket.socket, socket.socket]], host: str, to: str, listening: str
) -> None:
    _, accepted = pair(host, to, listening)
    assert peer_of(accepted) == Peer(host, os.geteuid())


@linux
def test_a_closed_connection_is_nobodys(pair: Callable[..., tuple[socket.socket, socket.socket]]) -> None:
    """The kernel counts such sockets as root's, and tells of one that listens at the address where there is none."""
    client, accepted = pair()
    client.shutdown(socket.SHUT_WR)
    assert peer_of(accepted).uid == os.geteuid(), "it still reads"
    client.close()
    assert peer_of(accepted).uid is None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert find_peer(listener.getsockname(), accepted.getsockname()).uid is None


@linux
def test_a_look_up_takes_less_than_a_millisecond_among_hundreds_of_connections(
    pair: Callable[..., tuple[socket.socket, socket.socket]],
) -> None:
    accepted = [pair()[1] for _ in range(200)][-1]
    seconds = []
    for _ in range(20):
        start = time.process_time()
        assert peer_of(accepted).uid is not None
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.001, "of the processor's time, which other programs do not take"


def test_where_the_system_does_not_say_it_the_user_is_unknown(
    pair: Callable[..., tuple[socket.socket, socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, accepted = pair()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert peer_of(accepted) == Peer("127.0.0.1", None)


@pytest.mark.parametrize("client", [("nowhere", 1), ("127.0.0.1", None), ("127.0.0.1", 1 << 16)])
def test_what_is_no_address_is_nobodys(client: tuple[str, int | None]) -> None:
    assert find_peer(client, ("127.0.0.1", 80)) == Peer(client[0])
    assert find_peer(None, client) == find_peer(client, None) == Peer("")


def test_without_tokens_another_machine_is_refused_even_if_the_service_is_open(settings: ServiceSettings) -> None:
    with in_process(replace(settings, is_open=True)) as client:
        client.app_state["peer"] = Peer("10.0.0.7")
        assert_problem(client.get("/v1/explorations"), 403)


FORGED = [{"X-Forwarded-For": "10.1.2.3"}, {"Forwarded": "for=10.1.2.3"}, {"x-forwarded-for": ""}]


@pytest.mark.parametrize("headers", FORGED)
def test_a_forwarded_request_is_refused_with_what_to_do(served: Served, headers: dict[str, str]) -> None:
    response = httpx.get(f"{served.url}/v1/explorations", headers=headers)
    assert_problem(response, 403)
    assert "--require-token and --trusted-proxy" in response.json()["detail"]


@pytest.mark.parametrize("headers", FORGED)
def test_a_token_does_not_make_a_forwarded_header_true(
    serve: Callable[[ServiceSettings], Served],
    settings: ServiceSettings,
    sqlite_database: Database,
    headers: dict[str, str],
) -> None:
    token = {"Authorization": f"Bearer {create_token(sqlite_database, 'ci')}"}
    others = (read_proxy("10.0.0.0/8"), os.geteuid() + 1)
    for proxies in ((), others):
        url = serve(replace(settings, require_token=True, trusted_proxies=proxies)).url
        assert_problem(httpx.post(f"{url}/v1/explorations", json=REQUEST, headers=token | headers), 403)
        assert httpx.get(f"{url}/v1/explorations", headers=token).status_code == 200
    assert [record for record in read_audit(sqlite_database) if record.action == "submit"] == []


@linux
def test_the_audit_has_the_address_that_a_trusted_proxy_adds(
    serve: Callable[[ServiceSettings], Served], settings: ServiceSettings, sqlite_database: Database
) -> None:
    token = {"Authorization": f"Bearer {create_token(sqlite_database, 'ci')}"}
    url = serve(replace(settings, require_token=True, trusted_proxies=(os.geteuid(),))).url
    for sent in (
        [("X-Forwarded-For", "10.1.2.3")],
        [("X-Forwarded-For", "192.0.2.66, 10.1.2.4")],  # the first is the client's own invention
        [("X-Forwarded-For", "192.0.2.66"), ("X-Forwarded-For", "10.1.2.5")],
        [("X-Forwarded-For", "anything")],
        [("Forwarded", "for=192.0.2.66")],
    ):
        headers = [*token.items(), *sent]
        assert httpx.post(f"{url}/v1/explorations", json=REQUEST, headers=headers).status_code == 202
    noted = [record.origin for record in read_audit(sqlite_database) if record.action == "submit"]
    assert noted[::-1] == ["10.1.2.3", "10.1.2.4", "10.1.2.5", "127.0.0.1", "127.0.0.1"]


@pytest.mark.slow(together="services")
@linux
@needs_root
def test_another_user_of_the_proxys_machine_cannot_forge_an_origin(sqlite_database: Database) -> None:
    admin = create_token(sqlite_database, "admin", scopes=ALL_SCOPES)
    headers = {"Authorization": f"Bearer {admin}", "X-Forwarded-For": "10.1.2.3"}
    proxy = pwd.getpwuid(OTHER).pw_name
    with forked("serve", "--trusted-proxy", proxy, BEXP_DATABASE_URL=sqlite_database.url) as service:
        url = service.url
        assert httpx.get(f"{url}/v1/explorations").status_code == 401, "behind a proxy, everybody needs a token"
        assert httpx.get(f"{url}/v1/explorations", headers=headers).status_code == 403
        assert ask_as(OTHER, url, headers)[0] == 200


def test_a_proxy_is_an_address_elsewhere_or_a_user_here() -> None:
    other, network = Peer("10.0.0.7"), read_proxy("10.0.0.0/8")
    assert other.is_among([network])
    assert not other.is_among([read_proxy("10.0.0.8"), 0])
    assert Peer("127.0.0.1", 33).is_among([33])
    assert not Peer("127.0.0.1", 34).is_among([33, network])
    assert not Peer("10.0.0.7", 34).is_among([network]), "a user of this machine"
    assert not Peer("127.0.0.1", None).is_among([33])
    assert read_proxy("root") == read_proxy("0") == 0
    with pytest.raises(ValueError, match="every user of this machine"):
        read_proxy("127.0.0.1")
    with pytest.raises(ValueError, match="neither an address nor a user"):
        read_proxy("no-such-user")
