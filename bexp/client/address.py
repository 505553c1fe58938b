"""The addresses of services."""

from __future__ import annotations

import ipaddress
import re


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
