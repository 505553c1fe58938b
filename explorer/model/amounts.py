"""Bytes, rates and times as text for a person, the same in logs, answers and exports."""

from __future__ import annotations

from enum import StrEnum


def bytes_text(count: int) -> str:
    """Return a number of bytes in the largest binary unit in which it is at least 1."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(size) >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


class RateUnit(StrEnum):
    """The unit of a rate: samples where nobody knows how many tokens they have."""

    TOKENS = "tokens"
    SAMPLES = "samples"


def is_in_tokens(unit: RateUnit) -> bool:
    """Return whether a rate is of tokens, as nearly all are: only another unit is written."""
    return unit is RateUnit.TOKENS


def rate_text(rate: float, unit: RateUnit = RateUnit.TOKENS) -> str:
    """Return a number of tokens, or of samples, a second."""
    return f"{rate:,.{0 if rate >= 100 else 1}f} {unit}/s"


def slower_text(loss: float, than: str | None = None) -> str:
    """Return a share of tokens/s that a candidate is slower than another, or faster if it is negative."""
    share = f"{abs(loss):.1%}"
    if share == "0.0%":
        return "as fast" if than is None else f"as fast as {than}"
    return f"{share} {'slower' if loss > 0 else 'faster'}{'' if than is None else f' than {than}'}"


def seconds_text(seconds: float) -> str:
    """Return a time in a unit that suits its size."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
