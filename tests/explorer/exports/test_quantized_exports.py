"""Quantised weights and the adapters over them, in every format that can be told them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml

from bexp.explorer.exports.exploration import ExportSource
from bexp.explorer.exports.export import export
from bexp.explorer.model.quantization import WeightBytes
from bexp.explorer.search.trainer_terms import formats_for
from bexp.explorer.trainers.document import ExportError
from tests.explorer.exports.samples import CONFIG, exploration

LORA: dict[str, Any] = {"r": 8, "target_modules": ["q_proj", "v_proj"]}
SCRIPTS = ("transformers", "accelerate", "deepspeed", "lightning", "python")


def quantized(name: str = "bnb_4bit", **changes: Any) -> ExportSource:
    return exploration(**{"quantization": name, "training": {"lora": LORA}, **changes})


def test_a_script_is_told_how_to_load_the_weights_and_to_prepare_them() -> None:
    four = (
        "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_use_double_quant=True, "
        "bnb_4bit_compute_dtype='bfloat16')"
    )
    for name in SCRIPTS:
        header = "\n".join(export(name, quantized()).header)
        assert sorted(four[19:-1].split(", ")) == sorted(_arguments(header)), name
        assert "peft.prepare_model_for_kbit_training(model" in header
        assert header.index("prepare_model_for_kbit_training") < header.index("get_peft_model")
        assert "weights: measured in 4 bits by bitsandbytes, loaded with dtype=bfloat16" in header
        assert _arguments("\n".join(export(name, quantized("bnb_8bit")).header)) == ["load_in_8bit=True"]


def _arguments(header: str) -> list[str]:
    return header.partition("BitsAndBytesConfig(")[2].partition(")")[0].split(", ")


def test_the_header_says_how_many_bytes_are_quantised() -> None:
    assert "experts 0 B of 1.0 GiB" in "\n".join(export("axolotl", with_experts(quantized(), 0)).header)


def with_experts(source: ExportSource, quantized_bytes: int) -> ExportSource:
    """The exploration of a model whose experts have so many quantised bytes."""
    assert source.report is not None
    assert source.report.parts is not None
    weights = (WeightBytes(kind="experts", num_bytes=1 << 30, quantized_bytes=quantized_bytes),)
    parts = source.report.parts.model_copy(update={"weights": weights})
    return replace(source, report=source.report.model_copy(update={"parts": parts}))


def test_experts_that_stay_plain_are_in_float32_where_a_trainer_prepares_them() -> None:
    """LLaMA-Factory and TRL keep them as they were loaded, so that their speed was not measured."""
    for name, halves in (("llamafactory", True), ("trl", True), ("axolotl", False), ("transformers", False)):
        plain = "\n".join(export(name, with_experts(quantized(), 0)).header)
        assert ("by itself keeps experts that are not quantised in bfloat16" in plain) is halves, name
        assert ("promises no tokens/s" in plain) is halves, name
        whole = "\n".join(export(name, with_experts(quantized(), 1 << 30)).header)
        assert "keeps experts" not in whole
        others = "LLaMA-Factory keeps the norms of a dense model in half precision as well"
        assert ("promises no tokens/s" in whole) is halves, others


def test_a_quantised_checkpoint_is_loaded_as_it_is() -> None:
    own = {**CONFIG, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    source = exploration(hf_config=own, training={"lora": LORA})
    header = "\n".join(export("transformers", source).header)
    assert "the checkpoint's own quantization_config, as measured" in header
    assert "BitsAndBytesConfig" not in header
    assert "quantization_bit" not in yaml.safe_load(export("llamafactory", source).text)
    assert yaml.safe_load(export("axolotl", source).text)["load_in_4bit"] is True


def test_every_choice_of_adapters_is_exported() -> None:
    lora = {
        "r": 8,
        "target_parameters": ["experts.gate_up_proj"],
        "modules_to_save": ["embed_tokens", "lm_head"],
        "use_rslora": True,
    }
    source = exploration(training={"lora": lora})
    config = (
        "peft.LoraConfig(r=8, lora_alpha=8, target_modules=[], target_parameters=['experts.gate_up_proj'], "
        "modules_to_save=['embed_tokens', 'lm_head'], use_rslora=True)"
    )
    assert all(config in "\n".join(export(name, source).header) for name in SCRIPTS)
    with pytest.raises(ExportError, match="LLaMA-Factory cannot express LoRA of single parameters"):
        export("llamafactory", source)
    assert source.recommendation is not None
    assert "llamafactory" not in formats_for(source.recommendation, source.request)


def test_linear_modules_are_named_where_a_trainer_does_not_list_them() -> None:
    source = exploration(training={"lora": {"r": 8, "target_modules": "linear-modules"}})
    assert source.report is not None
    assert source.report.parts is not None
    parts = source.report.parts.model_copy(update={"adapted": {"q_proj": 8, "o_proj": 8}})
    source = replace(source, report=source.report.model_copy(update={"parts": parts}))
    for name in ("transformers", "accelerate", "trl", "python"):
        assert "target_modules=['q_proj', 'o_proj']" in "\n".join(export(name, source).header), name
    assert "lora_target_linear: true" in export("axolotl", source).text
    assert "lora_target: all\n" in export("llamafactory", source).text


def test_all_linear_on_experts_is_said_where_a_trainer_lists_linear_layers_by_itself() -> None:
    source = exploration(training={"lora": {"r": 8, "target_modules": "all-linear"}})
    assert any("adapts experts in one tensor as well" in line for line in export("llamafactory", source).header)
    assert not any("in one tensor" in line for line in export("llamafactory", quantized()).header)
    assert "lora_target_modules: all-linear\n" in export("axolotl", source).text
