"""What is stored of a config.json."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bexp.explorer.formats.document import FormatError
from bexp.explorer.formats.huggingface import LARGEST_BYTES
from bexp.explorer.formats.request import parse_request
from bexp.explorer.model.config_rules import LONGEST_TEXT
from bexp.explorer.model.quantization import own_method

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "layer_types": ["full_attention"] * 2,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
    "a_new_key": {"of": ["a later version"]},
}


def stored(config: dict[str, Any]) -> dict[str, Any]:
    request = parse_request(config | {"seq_length": 128})
    assert request.hf_config is not None
    return request.hf_config


def test_labels_and_long_texts_are_left_out_and_the_rest_is_kept_as_it_is() -> None:
    labels = {str(i): f"LABEL_{i}" for i in range(2000)}
    long = "x" * (LONGEST_TEXT + 1)
    junk = {"id2label": labels, "task_specific_params": {"a": {"b": 1}}, "junk": long, long: 1}
    nested = {"rope_scaling": CONFIG["rope_scaling"] | {"comment": long}, "layer_types": [*CONFIG["layer_types"], long]}
    assert stored(CONFIG) == CONFIG
    assert stored(CONFIG | junk | nested) == CONFIG


def test_a_long_text_is_noted_with_its_place() -> None:
    long = "x" * (LONGEST_TEXT + 1)
    request = parse_request(CONFIG | {"seq_length": 128, "rope_scaling": {"comment": long}, long: long})
    assert f"rope_scaling.comment and 1 more of config.json left out: longer than {LONGEST_TEXT} characters" in (
        request.notices
    )
    assert not parse_request(CONFIG | {"seq_length": 128}).notices


def test_a_file_that_is_large_without_them_is_refused_with_its_largest_key() -> None:
    numbers = list(range(LARGEST_BYTES // 4))
    with pytest.raises(FormatError, match="larger than 32 KiB, without labels and long texts; junk alone has"):
        stored(CONFIG | {"junk": numbers})
    many = {f"key_{i}": "x" * LONGEST_TEXT for i in range(LARGEST_BYTES // LONGEST_TEXT)}
    with pytest.raises(FormatError, match="larger than 32 KiB"):
        stored(CONFIG | many)
    assert len(json.dumps(stored(CONFIG | dict(list(many.items())[:90])))) > 20_000


def test_of_a_quantisation_that_is_not_measured_its_method_stays() -> None:
    """Published files list thousands of modules there."""
    modules = [f"model.layers.{i}.mlp.gate" for i in range(5000)]
    for method, config in (("fp8", {"quant_method": "fp8", "ignore": modules}), ("?", {"ignore": modules})):
        kept = stored(CONFIG | {"quantization_config": config})
        assert own_method(kept) == method
        assert kept["quantization_config"] == {"quant_method": config.get("quant_method")}
    own = {"load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"], "quant_method": "bitsandbytes"}
    lora = {"training": {"lora": {"r": 8, "target_modules": ["q_proj"]}}}
    assert stored(CONFIG | {"quantization_config": own} | lora)["quantization_config"] == own


def test_another_target_gets_the_file_as_it_is() -> None:
    labels = {"id2label": {str(i): f"LABEL_{i}" for i in range(2000)}}
    assert parse_request({"target": "mine", "model": CONFIG | labels}).hf_config == CONFIG | labels
