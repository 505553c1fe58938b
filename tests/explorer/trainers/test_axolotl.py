"""Axolotl: where it casts to float32."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tests.explorer.trainers.test_trainer import LIBRARY, build, refusal


def test_axolotl_casts_nothing_to_float32_beside_shards_adapters_or_other_attention() -> None:
    for changes in (
        {"attention_backends": ["flash_attention_2"]},
        {"num_devices": 8, "training": {"sharding": "zero3"}},
        {"training": {"lora": {"r": 8, "target_modules": "all-linear"}}},
    ):
        assert build(LIBRARY, "axolotl", **changes).training.precision == "pure"
    both = build(LIBRARY, "axolotl", attention_backends=["sdpa", "flash_attention_2"])
    assert both.training.precision == "upcast"
    sharded = {"num_devices": 8, "training": {"sharding": "zero3", "precision": "upcast"}}
    assert "casts nothing to float32" in str(refusal(LIBRARY, "axolotl", **sharded))
    with pytest.raises(ValidationError, match="for trainer 'axolotl' alone"):
        build(LIBRARY, training={"precision": "upcast"})
