"""The addresses of services."""

from __future__ import annotations

import ipaddress
import re

from bexp.client.errors import ProblemError


def without_secrets(url: str) -> str:
    """Return a URL for a person: without user, password and query, each of which may be a secret."""
    scheme, separator, rest = url.partition("://")
    plain, *query = re.split(r"[?#]", rest if separator else url, maxsplit=1)
    in_doubt = "@" not in plain and "@" in "".join(query)  # either part may belong to a password
    shown = "..." if in_doubt else plain.rpartition("@")[2]
    return f"{scheme}{separator}{shown}" if separator else shown


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address, is this machine's own loopback."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


EXPLORATIONS = "/v1/explorations"
JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
"""What an id may be. A service is not trusted with more: the id becomes a part of a path, here and there."""


def exploration_path(job_id: str, *rest: str) -> str:
    """Return the path of an exploration, or of a part of it. Raises ProblemError for what cannot be an id."""
    if not JOB_ID.fullmatch(job_id):
        raise ProblemError(404, {"title": "Not Found", "detail": f"{job_id!r} is not the id of an exploration"})
    return "/".join((EXPLORATIONS, job_id, *rest))
