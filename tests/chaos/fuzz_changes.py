"""A request of the fuzz, and the one change that may be made to it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any
from urllib.parse import quote

import yaml

from bexp.explorer.formats.document import MAX_BYTES
from tests.chaos.requests import FIELDS, FILLERS, LEAVES, put

ODD_TEXTS = (
    *("", "0", "-1", "1", "0" * 5000, "0" * 20 + "9" * 30, "9" * 400, "1e309", "nan", "\x00", "%00", "%ff", "é"),
    *("../../etc/passwd", "x" * 300, "2024-01-01T00:00:00+14:00", "0001-01-01T00:00:00+14:00", "true", "null"),
    *("MDAwMS0wMS0wMVQwMDowMDowMCsxNDowMH5h", "OTk5OS0xMi0zMVQyMzo1OTo1OS0xNDowMH5h", "running", "*", '"1"'),
    *("0123456789abcdef", "text/event-stream", "text/plain", "image/png", "application/json;q=0", ",;=", "gzip"),
)
ODD_BYTES = (
    *(b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"{", b"}", b"[", b"]", b'"', b"\\u0000", b"\\ud800", b"1e309", b"-0"),
    *(b"NaN", b"&a *a", b"<<: ", b"!!python/object:os.system ", b"- ", b"? ", b": ", b"\n", b"\t", b"9" * 310, b"0x1f"),
)
HEADERS = ("Last-Event-ID", "Idempotency-Key", "If-None-Match", "Accept", "Origin", "Host", "Range", "Expect", "Cookie")
MALFORMED = (
    b"GET /v1/explorations HTTP/9.9\r\n\r\n",
    b"GET /v1/explorations\r\n\r\n",
    b"\x00\x01\x02\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nno colon\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nA: \x00\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"POST /v1/explorations HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/explorations HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/explorations HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    b"POST /v1/explorations HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n{",
)


@dataclass
class Tenant:
    """An owner, its tokens by name, and what is known of its explorations."""

    name: str
    tokens: dict[str, str]
    open: list[str] = field(default_factory=list)
    answered: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def move(self, job_id: str, to: list[str] | None) -> None:
        """Note what an exploration has become; None: it is gone."""
        for ids in (self.open, self.answered, self.ended):
            if job_id in ids:
                ids.remove(job_id)
        if to is not None:
            to.append(job_id)
            del to[:-1000]


@dataclass
class Request:
    """One request, and what must become of it.

    Attributes:
        route: method and path as the OpenAPI document has them; None: it has no such route.
        tenant: who sends it. Its answer may name no other owner; None: it may name any.
        change: what was changed; empty: nothing.
        expected: the statuses that the change must have; empty: any that is declared.
        is_refused: whether a 2xx is a fault.
        raw: the bytes of a request that is no HTTP; None: those of the other fields.
    """

    route: str | None
    method: str
    path: str
    tenant: Tenant | None
    job_id: str | None = None
    query: list[tuple[str, str]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    change: str = ""
    expected: frozenset[int] = frozenset()
    is_refused: bool = False
    is_chunked: bool = False
    raw: bytes | None = None

    @property
    def is_stream(self) -> bool:
        """Whether the answer may have no end."""
        return self.path.endswith(("/events", "/log"))

    def render(self) -> bytes:
        """Return what is sent."""
        if self.raw is not None:
            return self.raw
        query = "&".join(f"{quote(name, safe='')}={quote(value, safe='~:%+')}" for name, value in self.query)
        lines = [f"{self.method} {self.path}{'?' * bool(query)}{query} HTTP/1.1"]
        headers = {"Host": "127.0.0.1", **self.headers}
        body = self.body
        if body is not None and self.is_chunked:
            headers["Transfer-Encoding"] = "chunked"
            half = len(body) // 2
            parts = [part for part in (body[:half], body[half:]) if part]
            body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        elif body is not None:
            headers["Content-Length"] = str(len(body))
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "", ""]).encode("utf-8") + (body or b"")

    def send_json(self, document: Any) -> None:
        """Have a JSON document as the body."""
        self.headers["Content-Type"] = "application/json"
        self.body = json.dumps(document).encode()

    def describe(self) -> str:
        """Return the request in a line that is short enough for a report."""
        shown = {name: value[:60] for name, value in self.headers.items() if name != "Authorization"}
        sent = (self.raw or self.body or b"")[:300]
        return f"[{self.change}] {self.method} {self.path[:200]} {self.query} {shown} {sent!r}"[:900]


class Changes:
    """Changes one thing of a request, each kind as often as its weight says."""

    def __init__(
        self, routes: Mapping[str, Mapping[str, Any]], tenants: Sequence[Tenant], admin: Tenant, rng: Random
    ) -> None:
        self._routes = routes
        self._tenants = tenants
        self._admin = admin
        self._rng = rng
        self._weights: dict[Callable[[Request], bool], int] = {
            self._change_field: 10,
            self._change_parameter: 6,
            self._change_token: 5,
            self._change_header: 5,
            self._change_id: 5,
            self._change_bytes: 3,
            self._change_type: 2,
            self._change_path: 2,
            self._change_method: 2,
            self._break_framing: 1,
            self._enlarge: 1,
        }

    def apply(self, request: Request) -> None:
        """Make one change that the request allows, and note what the answer must be then."""
        while not request.change:
            change = self._rng.choices(list(self._weights), list(self._weights.values()))[0]
            if change(request):
                request.change = request.change or change.__name__.strip("_")

    def _change_field(self, request: Request) -> bool:
        """One field of the body gets another value, or is left out."""
        if request.body is None:
            return False
        document = yaml.load(request.body, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        rng = self._rng
        names = rng.choice(([name.split(".") for name in FIELDS], [[name] for name in document] or [["x"]]))
        path = rng.choice(names)
        if rng.random() < 0.2 and path[0] in document:
            del document[path[0]]
        else:
            filler = FILLERS[rng.choice(sorted(FILLERS))](rng.choice((1, 1, 5, 30, 1000, 9000)), rng.choice(LEAVES))
            put(document, path, rng.choice((filler, rng.choice(LEAVES), rng.choice(ODD_TEXTS))))
        request.send_json(document)
        request.body = (request.body or b"")[: MAX_BYTES - 1]
        return True

    def _change_parameter(self, request: Request) -> bool:
        """One query parameter has an odd value, or is none of the route."""
        known = [
            each["name"] for each in self._routes[request.route or ""].get("parameters", ()) if each["in"] == "query"
        ]
        name = self._rng.choice([*known, *known, self._rng.choice(("q", "limit", "", "\x00"))])
        request.query = [*(pair for pair in request.query if pair[0] != name), (name, self._rng.choice(ODD_TEXTS))]
        return True

    def _change_token(self, request: Request) -> bool:
        """No token, none of the service, or one that may not do this."""
        if not (request.route or "").split(" ")[-1].startswith("/v1/"):
            return False
        owner = request.tenant or self._admin
        kinds = ["none", "unknown", "odd", "expired", *(["lesser"] if request.method != "GET" else [])]
        kind = self._rng.choice(kinds)
        del request.headers["Authorization"]
        if kind == "odd":
            request.headers["Authorization"] = self._rng.choice(("Basic YTpi", "Bearer", f"Bearer {'x' * 3000}", "é"))
        elif kind != "none":
            request.headers["Authorization"] = f"Bearer {owner.tokens.get(kind, 'bexp_' + 'a' * 43)}"
        request.expected = frozenset({403 if kind == "lesser" else 401})
        request.is_refused = True
        request.change = f"{kind}_token"
        return True

    def _change_header(self, request: Request) -> bool:
        """One header has an odd value."""
        value = self._rng.choice(ODD_TEXTS).replace("\x00", "")  # such a byte ends a connection, with what follows
        request.headers[self._rng.choice(HEADERS)] = value
        return True

    def _change_id(self, request: Request) -> bool:
        """An exploration of another owner, one that is unknown, or none."""
        if request.job_id is None or request.tenant is None:
            return False
        others = [tenant for tenant in self._tenants if tenant is not request.tenant]
        of_others = [job_id for tenant in others for job_id in (*tenant.open, *tenant.answered, *tenant.ended)]
        request.change = self._rng.choice(("stranger", "unknown_id"))
        texts = of_others if request.change == "stranger" and of_others else ["0123456789abcdef", *ODD_TEXTS]
        text = quote(self._rng.choice(texts), safe="~:%+")
        request.path = request.path.replace(request.job_id, text, 1)
        if "/" in text or not text:
            request.route = None
        request.is_refused = request.change == "stranger"
        request.job_id = None
        return True

    def _change_bytes(self, request: Request) -> bool:
        """Some bytes of the body are others."""
        if request.body is None:
            return False
        rng, body = self._rng, request.body
        start = rng.randrange(len(body) + 1)
        end = min(len(body), start + rng.choice((0, 0, 1, 4, 30, len(body))))
        odd = rng.choice(ODD_BYTES)
        inserted = rng.choice((b"", odd, odd * 50, odd * 3000, bytes([rng.randrange(256)]), body[start:end] * 2))
        request.body = (body[:start] + inserted + body[end:])[: MAX_BYTES - 1]
        return True

    def _change_type(self, request: Request) -> bool:
        """The body is said to be something else."""
        if request.body is None:
            return False
        name, value = self._rng.choice(
            (
                *(("Content-Type", "text/plain"), ("Content-Type", "application/json; charset=utf-16")),
                *(("Content-Type", "x" * 300), ("Content-Type", ""), ("Content-Encoding", "gzip")),
            )
        )
        request.headers[name] = value
        request.is_refused = True
        return True

    def _change_path(self, request: Request) -> bool:
        """The path is none of the service, or differs by a character."""
        path = request.path
        request.path = self._rng.choice((f"{path}/", f"/{path}", path.upper(), f"{path}%2f", "/v1", "/v1/é", "/*"))
        request.path = quote(request.path, safe="/%*")
        request.route, request.is_refused = None, True
        return True

    def _change_method(self, request: Request) -> bool:
        """The method is another; the route with that method may be there."""
        method, path = self._rng.choice(("PATCH", "HEAD", "OPTIONS", "PUT", "POST", "TRACE", "x")), request.path
        template = (request.route or "").split(" ")[1]
        if f"{method} {template}" in self._routes or not path.startswith("/v1/"):  # HEAD is for health checks
            return False
        request.method, request.route, request.path = method, None, path
        return True

    def _break_framing(self, request: Request) -> bool:
        """What is sent is not HTTP, or not all of it."""
        request.raw, request.method, request.route = self._rng.choice(MALFORMED), "GET", None
        request.is_refused = True
        return True

    def _enlarge(self, request: Request) -> bool:
        """The body is larger than the service takes."""
        if request.body is None:
            return False
        request.body += b" " * (MAX_BYTES + 1 - len(request.body))
        request.expected, request.is_refused = frozenset({413, 404, 403}), True
        return True
