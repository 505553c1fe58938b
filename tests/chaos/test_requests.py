"""A short search for slow requests, and those that were slow once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.chaos.requests import EXPERTS, LIMIT_SECONDS, MODEL, measure, search

DEEP = {**MODEL, "position": "none", "moe": EXPERTS}
WIDE = {"micro_batch_size": list(range(193, 257)), "sharding_levels": "explore", "num_devices": 2}


def dump(document: dict[str, Any]) -> str:
    return json.dumps(document, separators=(",", ":"))


@pytest.mark.parametrize(
    "text",
    [
        dump({"model": DEEP}),
        dump({"model": DEEP, **WIDE}),
        dump({"model": MODEL, **{f"k{i}": 1 for i in range(8000)}}),
        dump({"a": [1] * 120_000}),
        "a: [" + "1," * 120_000 + "]",
        "a: 1" + ":1" * 120_000,
        dump({"model": MODEL, "notices": [1] * 100_000}),
        dump({"target": "bexp", "model": {"model_type": "qwen3_moe", "mlp_only_layers": [1] * 100_000}}),
    ],
    ids=["deep", "deep and wide", "unknown keys", "list", "YAML list", "base of 60", "notices", "dense layers"],
)
def test_a_request_that_was_slow_once_is_read_within_the_limit(text: str) -> None:
    assert min(measure(text) for _ in range(2)) <= LIMIT_SECONDS


def test_no_request_that_a_search_finds_takes_longer_than_the_limit() -> None:
    slowest = search(12, derandomize=True)
    assert slowest.seconds <= LIMIT_SECONDS, slowest.text[:400]
