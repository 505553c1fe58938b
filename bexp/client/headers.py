"""The headers by which a service and its clients know each other's additions to HTTP."""

from __future__ import annotations

NOTE_HEADER = "Bexp-Export-Note"
"""A header for each line that belongs to an export whose format has no comments."""
