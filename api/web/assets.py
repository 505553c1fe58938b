"""The files of the page, as they are sent to a browser."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".txt": "text/plain; charset=utf-8",
}
"""The types by a file's suffix. The machine's own table is not used, because on some it calls scripts plain text."""

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""Allows only the files of this service: no script or style within a document, and no other host."""

HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "same-origin",
    "Vary": "Accept-Encoding",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """A file of the page, also `packed` by gzip; `digest` changes with its content."""

    body: bytes
    packed: bytes
    media_type: str
    digest: str

    @classmethod
    def of(cls, body: bytes, media_type: str) -> Asset:
        """Return an asset with the digest of its content."""
        return cls(body, gzip.compress(body, mtime=0), media_type, hashlib.sha256(body).hexdigest()[:32])


@cache
def read_assets() -> dict[str, Asset]:
    """Return the files of the page by name."""
    assets: dict[str, Asset] = {}
    for file in resources.files(__package__).iterdir():
        media_type = MEDIA_TYPES.get("." + file.name.rpartition(".")[2])
        if media_type is not None:
            assets[file.name] = Asset.of(file.read_bytes(), media_type)
    return assets
