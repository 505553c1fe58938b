"""TRL: its loss, and its number formats beside quantised weights."""

from __future__ import annotations

from typing import Any

from bexp.explorer.exports.export import export
from tests.explorer.exports.samples import exploration
from tests.explorer.exports.test_quantized_exports import LORA, quantized
from tests.explorer.formats.test_trainer_files import read


def test_the_loss_in_chunks_of_trl_is_said_not_to_be_measured() -> None:
    changes: tuple[dict[str, Any], ...] = ({}, {"loss_type": "chunked_nll"})
    for change in changes:
        asked = read("trl", **change)
        assert asked.losses == ("library",)
        assert any("is not measured" in notice and "sets loss_type: nll" in notice for notice in asked.notices)
    assert not any("chunked_nll" in notice for notice in read("trl", loss_type="nll").notices)


def test_trl_says_that_it_trains_a_quantised_model_in_bfloat16() -> None:
    """It casts what is trained by itself, so that neither bytes nor tokens/s are the measured ones."""
    cast = "TRL casts what it trains of a quantised model to bfloat16 (adapters, modules_to_save)"
    for name in ("trl", "transformers"):
        header = "\n".join(export(name, quantized()).header)
        assert (cast in header) is ("promises no tokens/s" in header) is (name == "trl")
    plain = "\n".join(export("trl", exploration(training={"lora": LORA})).header)
    assert cast not in plain
    assert "expect about 1,000 tokens/s" in plain
