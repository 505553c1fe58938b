"""The label tokens of samples, and an order in which micro-batches differ most in their label tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MASKS = ("completion_mask", "assistant_masks", "loss_mask")
IGNORED = -100


def label_tokens(sample: Any) -> int | None:
    """Return the number of tokens that a sample's loss counts; None if the sample does not say."""
    if not hasattr(sample, "keys"):
        return None
    rows = {name: sample[name] for name in sample.keys() if _is_row(sample[name])}  # noqa: SIM118 - more than dicts
    if "labels" in rows:
        return sum(1 for label in _listed(rows["labels"]) if label != IGNORED)
    for name in MASKS:
        if name in rows:
            return sum(map(bool, _listed(rows[name])))
    texts = [row for name, row in rows.items() if name.endswith("_ids")]
    return sum(map(len, texts)) if texts else None


def most_unequal(tokens: Sequence[int | None]) -> list[int]:
    """Return the places of samples from few tokens to many; unsorted if the tokens of one are not known."""
    return sorted(range(len(tokens)), key=lambda place: 0 if None in tokens else tokens[place] or 0)


def _is_row(value: Any) -> bool:
    """Return whether a value is a row, and neither one number nor text."""
    return hasattr(value, "__len__") and not isinstance(value, str | bytes) and getattr(value, "ndim", 1) == 1


def _listed(values: Any) -> list[Any]:
    found: list[Any] = values.tolist() if hasattr(values, "tolist") else list(values)
    return found
