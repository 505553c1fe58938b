"""Axolotl: what it casts, cuts and packs by itself."""

from __future__ import annotations

import pytest
import yaml
from pydantic import ValidationError

from bexp.explorer.exports.export import export
from tests.explorer.exports.samples import SHARDED, candidate, exploration
from tests.explorer.exports.test_formats import LORA
from tests.explorer.exports.test_quantized_exports import quantized
from tests.explorer.exports.test_texts import told
from tests.explorer.trainers.test_trainer import LIBRARY, build, refusal


def test_axolotl_says_what_it_casts_by_itself() -> None:
    """It casts norms and embeddings to float32, and back for adapters, shards and attention that needs it."""
    cast = "Axolotl keeps norms and embeddings in float32"
    flash = candidate(attention_backend="flash_attention_2")
    measured = "\n".join(export("axolotl", exploration(trainer="axolotl")).header)
    assert "as measured with norms, embeddings, output layer and routers in float32" in measured
    assert cast not in measured
    assert cast in "\n".join(export("axolotl", exploration()).header)
    for answer in (exploration(flash), exploration(**SHARDED), exploration(training={"lora": LORA})):
        assert cast not in "\n".join(export("axolotl", answer).header)
    under = [export("axolotl", answer) for answer in (exploration(), exploration(training={"lora": LORA}))]
    assert ["computes under autocast" in "\n".join(made.header) for made in under] == [True, False]


def test_axolotl_is_told_to_cut_texts_as_measured() -> None:
    """By itself it drops those that are longer than a sequence."""
    for batching in ("padded", "grouped", "packed"):
        assert told("axolotl", batching=batching)["excess_length_strategy"] == "truncate"
    assert "excess_length_strategy" not in yaml.safe_load(export("axolotl", exploration()).text)


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


def test_it_says_what_it_may_cast_beside_quantised_weights() -> None:
    flash = quantized(best=candidate(attention_backend="flash_attention_2"))
    cast = "Axolotl may cast norms, embeddings and output layer to bfloat16"
    assert [cast in "\n".join(export("axolotl", one).header) for one in (flash, quantized())] == [True, False]
