from __future__ import annotations

from typing import Any

import pytest

from bexp.workers.targets.transformers.config import UnsupportedModelError, library_version, resolve_config
from bexp.workers.targets.transformers.resolved import resolve

pytest.importorskip("transformers")

GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 64}


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({"model_type": "llama", "auto_map": {"AutoModelForCausalLM": "code.Model"}}, "never run"),
        ({"model_type": "llama", "trust_remote_code": True}, "never run"),
        ({"model_type": "llama", "attn_implementation": "owner/kernels@main"}, "nothing is fetched"),
        ({}, "model_type: must name"),
        ({"model_type": "no_such_model"}, "unknown to the library; a target of your own measures it whole"),
        ({"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}, "write that instead"),
        ({"model_type": "vit"}, "no causal language model"),
        ({"model_type": "llama", "num_hidden_layers": 513}, "num_hidden_layers: must be a number from -512 to 512"),
        ({"model_type": "nemotron_h", "layers_block_type": ["mamba"] * 513}, "has 513 items; at most 512"),
        ({"model_type": "longcat_flash", "num_layers": 300}, "600 layers; at most 512"),
        ({"model_type": "llama", "to_dict": 1}, "to_dict is a method of LlamaConfig"),
        ({"model_type": "llama", "hidden_size": "wide"}, "refused"),
    ],
)
def test_a_configuration_that_cannot_be_built_is_refused_with_the_version(raw: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason) as refusal:
        resolve_config(raw, 128)
    assert str(library_version()) in str(refusal.value)


def test_a_model_with_too_many_parameters_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="at most 1000 are allowed"):
        resolve(GPT2, 64, max_parameters=1000)


def test_positions_of_padding_hold_no_token() -> None:
    roberta = {"model_type": "roberta", "is_decoder": True, "hidden_size": 32, "num_hidden_layers": 1}
    roberta |= {"num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100, "max_position_embeddings": 66}
    assert resolve(roberta, 64).config.seq_length == 64
    with pytest.raises(UnsupportedModelError, match="longer than max_position_embeddings 66 less 2 that no token has"):
        resolve(roberta, 65)


def test_a_table_of_positions_bounds_the_sequence_and_rotary_positions_do_not() -> None:
    with pytest.raises(UnsupportedModelError, match="longer than max_position_embeddings 64"):
        resolve(GPT2, 65)
    rotary = {"model_type": "llama", "max_position_embeddings": 64, "hidden_size": 64, "num_attention_heads": 4}
    resolved = resolve({**rotary, "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 128}, 65)
    assert resolved.config.seq_length == 65


def test_quantization_is_left_out() -> None:
    config = resolve_config({**GPT2, "quantization_config": {"quant_method": "fp8"}}, 64)
    assert getattr(config.config, "quantization_config", None) is None
    assert not config.config.use_cache
