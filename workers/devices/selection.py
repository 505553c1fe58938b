"""The choice of the devices that a worker owns."""

from __future__ import annotations

from collections.abc import Sequence


def parse_counts(text: str) -> tuple[int, ...]:
    """Parse numbers of devices that are acceptable: `2`, or `1,2,4`.

    Raises:
        ValueError: `text` has another form.
    """
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"'{text}' must be a number of devices, or several numbers joined by commas")
    return tuple(map(int, parts))


def default_devices(
    visible: Sequence[str], *, group: bool = False, counts: Sequence[int] | None = None
) -> tuple[str, ...]:
    """Return the first GPU, or all GPUs for a group, or the CPU if the host has no GPU.

    With `counts`, return as many GPUs as the largest of these numbers that the host has.

    Raises:
        ValueError: there are fewer than the smallest of `counts`.
    """
    gpus = [device for device in visible if device != "cpu"] or ["cpu"]
    if counts is None:
        return tuple(gpus) if group else (gpus[0],)
    enough = [count for count in counts if count <= len(gpus)]
    if not enough:
        raise ValueError(f"{min(counts)} devices are needed, and there is {', '.join(gpus)} here")
    return tuple(gpus[: max(enough)])
