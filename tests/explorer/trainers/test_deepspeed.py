"""DeepSpeed: its JSON in and out."""

from __future__ import annotations

import json
from typing import Any

from bexp.explorer.exports.export import export
from tests.explorer.exports.samples import exploration


def test_deepspeed_overlaps_what_the_figures_overlap_and_says_what_it_cannot() -> None:
    """By default it reduces while backward goes on with ZeRO-3 alone; a bucket has 5e8 gradients of two bytes."""
    zero: dict[str, dict[str, Any]] = {}
    notes: dict[str, str] = {}
    for level in ("none", "zero1", "zero2", "zero3"):
        made = export("deepspeed", exploration(num_devices=8, training={"sharding": level}))
        zero[level], notes[level] = json.loads(made.text)["zero_optimization"], "\n".join(made.header)
    assert zero["none"] == {"stage": 0} and "reduces gradients when backward has ended" in notes["none"]
    assert zero["zero1"] == {"stage": 1, "overlap_comm": True}
    assert zero["zero2"] == {"stage": 2, "overlap_comm": True}
    assert "(2 x 500,000,000) take 1.9 GiB" in notes["zero2"] and "gathers parameters after" in notes["zero2"]
    assert "(1 x 500,000,000) take 0.9 GiB" in notes["zero3"] and "gathers parameters after" not in notes["zero3"]
    alone = export("deepspeed", exploration())
    assert not any(line.startswith("communication") for line in alone.header)
