"""Quantised weights in a request: what is meant, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from bexp.explorer.formats.document import FormatError
from bexp.explorer.formats.request import parse_request
from bexp.explorer.model.quantization import QLORA, WeightBytes, describe_weights, own_method
from bexp.explorer.request.request import ExplorationRequest
from tests.explorer.model.test_optimizers import LLAMA, MODEL

FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}
LORA = {"lora": {"r": 8, "target_modules": "all-linear"}}


def request(own: Any = None, **fields: Any) -> ExplorationRequest:
    config = LLAMA if own is None else {**LLAMA, "quantization_config": own}
    source = {"hf_config": config, "hf_seq_length": 64} if "model" not in fields else {}
    return ExplorationRequest.model_validate({**source, "training": LORA, **fields})


def test_a_name_stands_for_the_arguments_that_the_library_takes() -> None:
    four, eight = request(quantization="bnb_4bit").quantized, request(quantization="bnb_8bit").quantized
    assert four is not None
    assert eight is not None
    assert (four.arguments, four.bits, four.name, four.is_own) == (QLORA, 4, "bnb_4bit", False)
    assert (eight.arguments, eight.bits, eight.name) == ({"load_in_8bit": True}, 8, "bnb_8bit")
    assert request().quantized is None
    assert "quantization" not in request().model_dump()


def test_a_checkpoint_says_it_by_itself() -> None:
    for name in (None, "bnb_4bit"):
        found = request(FOUR, quantization=name).quantized
        assert found is not None
        assert (found.arguments, found.is_own, found.bits) == (FOUR, True, 4)
    assert request(FOUR, quantization="none", training={}).quantized is None
    assert own_method({"quantization_config": {"load_in_8bit": True}}) == "bitsandbytes"
    assert request({"load_in_8bit": True}).quantized is not None


def test_evaluation_needs_no_adapters() -> None:
    assert request(quantization="bnb_8bit", mode="eval", training={}).quantized is not None


@pytest.mark.parametrize(
    ("own", "fields", "why"),
    [
        (
            None,
            {"quantization": "bnb_4bit", "training": {}},
            "weights in 4 bits cannot be trained themselves: add train",
        ),
        (FOUR, {"training": {}}, "weights in 4 bits cannot be trained themselves: add training.lora"),
        (None, {"quantization": "bnb_8bit", "model": MODEL, "training": {}}, "needs target 'transformers'"),
        (None, {"quantization": "gptq"}, "'none', 'bnb_4bit' or 'bnb_8bit'"),
        (FOUR, {"quantization": "bnb_8bit"}, "have 4 bits already; quantization: none measures plain weights"),
        ({"quant_method": "gptq"}, {"quantization": "bnb_4bit"}, "quantised already, by 'gptq'"),
        ({"quant_method": "gptq"}, {}, "adapters on weights that 'gptq' quantises are not measured"),
        ({"quant_method": "bitsandbytes"}, {}, "must state either load_in_4bit or load_in_8bit"),
        (None, {"quantization": "bnb_4bit", "training": {**LORA, "precision": "autocast"}}, "leave precision out"),
        (
            None,
            {"quantization": "bnb_4bit", "training": {**LORA, "sharding": "zero2"}, "num_devices": 2},
            "measured without sharding",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(own: Any, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        request(own, **fields)


def test_weights_that_another_method_quantises_are_measured_plain_and_noted() -> None:
    config = {**LLAMA, "quantization_config": {"quant_method": "fp8"}, "seq_length": 64}
    assert any("(fp8) is left out: plain weights" in notice for notice in parse_request(config).notices)
    own = {**LLAMA, "quantization_config": FOUR, "seq_length": 64}
    assert any("left out" in notice for notice in parse_request(own, overrides={"quantization": "none"}).notices)
    assert parse_request({**own, "training": LORA}).notices == ()
    with pytest.raises(FormatError, match="cannot be trained themselves"):
        parse_request(own)


@pytest.mark.parametrize(
    ("lora", "why"),
    [
        ({"r": 4}, "names what gets adapters"),
        ({"r": 4, "target_parameters": ["experts.down_proj"], "use_dora": True}, "no DoRA of parameters"),
        ({"r": 4, "target_parameters": []}, "at least 1 item"),
        ({"r": 4, "target_modules": "all-linear", "modules_to_save": [""]}, "at least 1 character"),
    ],
)
def test_adapters_that_peft_does_not_have_are_refused(lora: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        request(training={"lora": lora})


def test_the_line_says_what_is_quantised_and_what_is_not() -> None:
    attention = WeightBytes(kind="attention", num_bytes=1 << 30, quantized_bytes=1 << 30)
    experts = WeightBytes(kind="experts", num_bytes=3 << 30, quantized_bytes=0)
    line = describe_weights([attention, experts])
    assert line.startswith("1.0 GiB of 4.0 GiB are quantised: attention 1.0 GiB of 1.0 GiB, experts 0 B of")
    assert line.endswith("transformers quantises linear layers alone, and these experts are none")
    assert describe_weights([attention]) == ("1.0 GiB of 1.0 GiB are quantised: attention 1.0 GiB of 1.0 GiB")
