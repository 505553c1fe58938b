"""HTTP requests for the fuzz: valid ones, ones put together from what is known to be odd, and changed ones."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from bexp.explorer.formats.document import MAX_BYTES
from tests.chaos.requests import BASES, FIELDS, FILLERS, LEAVES, SPACES, put

JOBS = "/v1/explorations"
UNKNOWN_ID = "0123456789abcdef"
ODD_TEXTS = (
    *("", "0", "-1", "1", "0" * 5000, "0" * 20 + "9" * 30, "9" * 400, "1e309", "nan", "\x00", "%00", "%ff", "é"),
    *("../../etc/passwd", "x" * 300, "2024-01-01T00:00:00+14:00", "0001-01-01T00:00:00+14:00", "true", "null"),
    *("MDAwMS0wMS0wMVQwMDowMDowMCsxNDowMH5h", "OTk5OS0xMi0zMVQyMzo1OTo1OS0xNDowMH5h", "running", "*", '"1"'),
)
ODD_BYTES = (
    *(b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"{", b"}", b"[", b"]", b'"', b"\\u0000", b"\\ud800", b"1e309", b"-0"),
    *(b"NaN", b"&a *a", b"<<: ", b"!!python/object:os.system ", b"- ", b"? ", b": ", b"\n", b"\t", b"9" * 310, b"0x1f"),
)
TYPES = ("application/json", "application/yaml", "text/plain", "application/json; charset=utf-16", "", "x" * 300)
ACCEPTS = ("*/*", "application/json", "text/event-stream", "text/plain", "image/png", "application/json;q=0", ",;=")
HEADERS = (
    "Last-Event-ID",
    "Idempotency-Key",
    "If-None-Match",
    "Accept",
    "Content-Type",
    "Authorization",
    "Origin",
    "Host",
)
PARAMETERS = ("limit", "cursor", "state", "after", "follow", "format", "model", "q")
MAX_STEPS = 4


@dataclass(frozen=True)
class Request:
    """One HTTP request. `path` may hold `{id}`, which a job's id replaces."""

    method: str
    path: str
    query: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""

    def describe(self) -> str:
        """Return the request in a line that is short enough for a report."""
        query = f"?{self.query}" if self.query else ""
        return f"{self.method} {self.path}{query} {self.headers} {self.body[:300]!r} ({len(self.body)} bytes)"[:900]


def seeds(paths: list[tuple[str, str]]) -> list[Request]:
    """Return a plain request for each method and path of the application, and valid submissions."""
    found = [Request(method, path.replace("{exploration_id}", "{id}")) for method, path in paths]
    json_type = (("Content-Type", "application/json"),)
    found += [
        Request("POST", JOBS, headers=json_type, body=json.dumps(base | space).encode())
        for base in BASES
        for space in SPACES
    ]
    return found


def draw(rng: Random, corpus: list[Request]) -> Request:
    """Return a request: half of the time a changed one of the corpus, else a submission put together anew."""
    if rng.random() < 0.5:
        return change(rng, rng.choice(corpus), corpus)
    return _submission(rng)


def change(rng: Random, request: Request, corpus: list[Request]) -> Request:
    """Return the request with some parts replaced, added, or spliced in from another one."""
    for _ in range(rng.randint(1, MAX_STEPS)):
        part = rng.choice(("body", "body", "query", "header", "header", "path"))
        if part == "body" and request.body:
            request = replace(request, body=_change_bytes(rng, request.body, rng.choice(corpus).body)[: MAX_BYTES + 10])
        elif part == "query":
            parameter = f"{rng.choice(PARAMETERS)}={_quote(rng.choice(ODD_TEXTS))}"
            request = replace(request, query=f"{request.query}&{parameter}" if request.query else parameter)
        elif part == "header":
            request = replace(request, headers=(*request.headers, (rng.choice(HEADERS), _header(rng))))
        elif part == "path":
            odd = _quote(rng.choice((*ODD_TEXTS, UNKNOWN_ID)))
            request = replace(request, path=request.path.replace("{id}", odd, 1))
    return request


def _submission(rng: Random) -> Request:
    document: dict[str, Any] = json.loads(json.dumps(rng.choice(BASES) | rng.choice(SPACES)))
    size = rng.choice((1, 1, 5, 30, 100, 1000, 6000, 19_000))
    for name in rng.sample(FIELDS, rng.randint(0, 3)):
        put(document, name.split("."), FILLERS[rng.choice(sorted(FILLERS))](size, rng.choice(LEAVES)))
    text = json.dumps(document, separators=(",", ":"))
    form = rng.choice(("application/json", "application/json", "application/yaml"))
    headers = [("Content-Type", form)]
    if rng.random() < 0.1:
        headers.append(("Idempotency-Key", rng.choice(ODD_TEXTS)[:40]))
    return Request("POST", JOBS, headers=tuple(headers), body=text.encode()[:MAX_BYTES])


def _change_bytes(rng: Random, body: bytes, other: bytes) -> bytes:
    start = rng.randrange(len(body) + 1)
    end = min(len(body), start + rng.choice((0, 0, 1, 4, 30, len(body))))
    inserted = rng.choice(
        (
            *(b"", rng.choice(ODD_BYTES), rng.choice(ODD_BYTES) * rng.choice((1, 50, 3000))),
            *(bytes([rng.randrange(256)]), body[start:end] * 2, other[start : start + 200]),
        )
    )
    return body[:start] + inserted + body[end:]


def _header(rng: Random) -> str:
    return rng.choice((*ODD_TEXTS, *TYPES, *ACCEPTS))


def _quote(text: str) -> str:
    return "".join(
        c if (c.isascii() and c.isalnum()) or c in "-_.~%:+" else "".join(f"%{b:02X}" for b in c.encode()) for c in text
    )
