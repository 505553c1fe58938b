"""The names of devices: `cpu`, `cuda:0`, and what joins several."""

from __future__ import annotations

import re

RECORDED = "replay:"
"""What stands before the path of a recorded table where a device is named."""
_DEVICES = re.compile(r"cpu|cuda(?::(?P<first>\d{1,4})(?:-(?P<last>\d{1,4}))?)?")


def parse_devices(text: str) -> tuple[str, ...]:
    """Parse `cpu`, `cuda:0`, or `cuda:0-3` for four devices; `cuda` is `cuda:0`. Commas join several.

    Raises:
        ValueError: `text` has another form.
    """
    return tuple(device for part in text.split(",") for device in _parse_part(part))


def _parse_part(text: str) -> tuple[str, ...]:
    match = _DEVICES.fullmatch(text)
    if match is None:
        raise ValueError(f"device '{text}' is none of cpu, cuda:0, cuda:0-3 and replay:TABLE")
    if text == "cpu":
        return ("cpu",)
    first = int(match["first"] or 0)
    last = int(match["last"] or first)
    if last < first:
        raise ValueError(f"device '{text}' counts backwards")
    return tuple(f"cuda:{i}" for i in range(first, last + 1))
