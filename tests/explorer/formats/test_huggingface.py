"""Imported configurations against transformers itself, built on the meta device."""

from __future__ import annotations

from typing import Any

import pytest

from bexp.explorer.cost.parameters import count_parameters
from bexp.explorer.formats.document import load_document
from bexp.explorer.formats.families import FAMILIES
from bexp.explorer.formats.request import parse_request
from bexp.explorer.model.model import LayerKind, ModelSpec
from bexp.explorer.request.request import ExplorationRequest
from tests.explorer.formats.refusals import refusal

VARIANTS: list[dict[str, Any]] = [
    *({"model_type": name} for name in FAMILIES),
    {"model_type": "gpt2", "n_inner": 999, "n_embd": 96, "n_layer": 3, "tie_word_embeddings": False},
    {"model_type": "gpt2", "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 77},
    {"model_type": "gpt_neox", "num_hidden_layers": 2, "attention_bias": False, "tie_word_embeddings": True},
    {"model_type": "gpt_neox", "num_hidden_layers": 2, "use_parallel_residual": False, "rotary_pct": 0.5},
    {"model_type": "llama", "num_hidden_layers": 2, "num_key_value_heads": 4, "tie_word_embeddings": True},
    {"model_type": "llama", "num_hidden_layers": 2, "num_key_value_heads": None, "head_dim": None},
    {"model_type": "llama", "num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True},
    {"model_type": "llama", "num_hidden_layers": 2, "head_dim": 64, "num_key_value_heads": 1},
    {"model_type": "mistral", "num_hidden_layers": 2, "head_dim": 96, "num_key_value_heads": 2},
    {"model_type": "qwen2", "num_hidden_layers": 2, "num_key_value_heads": 2, "tie_word_embeddings": True},
    {"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 1024, "num_attention_heads": 16,
     "num_key_value_heads": 8, "tie_word_embeddings": True},
    {"model_type": "qwen3", "num_hidden_layers": 2, "attention_bias": True},
    {"model_type": "mixtral", "num_hidden_layers": 2, "num_experts": 5, "num_experts_per_tok": 3},
    {"model_type": "mixtral", "num_hidden_layers": 2, "num_local_experts": 3, "head_dim": 32},
    {"model_type": "olmoe", "num_hidden_layers": 2, "num_key_value_heads": 4, "attention_bias": True},
    {"model_type": "olmoe", "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2},
    {"model_type": "qwen2_moe", "num_hidden_layers": 4, "decoder_sparse_step": 2, "qkv_bias": False},
    {"model_type": "qwen3_moe", "num_hidden_layers": 6, "decoder_sparse_step": 2},
    {"model_type": "qwen3_moe", "num_hidden_layers": 6, "mlp_only_layers": [0, 1]},
    {"model_type": "qwen3_moe", "num_hidden_layers": 6, "mlp_only_layers": [1, 0], "decoder_sparse_step": 3},
    {"model_type": "qwen3_moe", "num_hidden_layers": 5, "mlp_only_layers": [0, 1, 2, 3, 4]},
    {"model_type": "qwen3_moe", "num_hidden_layers": 5, "decoder_sparse_step": 9},
    {"model_type": "qwen3_moe", "num_hidden_layers": 3, "num_experts": 0},
    {"model_type": "qwen3_moe", "num_hidden_layers": 5, "mlp_only_layers": [4], "decoder_sparse_step": 3},
    {"model_type": "qwen3_moe", "num_hidden_layers": 2, "head_dim": 128, "num_key_value_heads": 8,
     "attention_bias": True},
]  # fmt: skip


def parse(config: dict[str, Any], **overrides: Any) -> ExplorationRequest:
    """Read a configuration for the reference layers, whatever the default target is."""
    return parse_request(config, overrides={"target": "bexp", **overrides})


def describe(config: dict[str, Any]) -> str:
    return "-".join(str(value) for value in config.values())


@pytest.mark.parametrize("config", VARIANTS, ids=describe)
def test_parameter_counts_equal_those_of_transformers(config: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        reference = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    expected = sum(parameter.numel() for parameter in reference.parameters())
    assert count_parameters(import_model(config)) == expected


def resolve(model: ModelSpec) -> ModelSpec:
    """With the defaults written out, as a saved file may have them."""
    return model.model_copy(update={"num_query_groups": model.query_groups, "head_dim": model.head_size})


def import_model(config: dict[str, Any]) -> ModelSpec:
    return parse(config).shapes


def refused(config: dict[str, Any]) -> dict[tuple[str | int, ...], str]:
    return refusal(config, target="bexp")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_configuration_saved_by_transformers_is_read(model_type: str) -> None:
    """Every field of a saved file is either honoured or known to have no bearing, in this version of transformers."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type)
    for use_diff in (True, False):
        saved = load_document(config.to_json_string(use_diff=use_diff))
        assert resolve(import_model(saved)) == resolve(import_model({"model_type": model_type}))


def test_both_vintages_of_names_are_read() -> None:
    old = {"model_type": "gpt_neox", "torch_dtype": "float16", "rotary_pct": 0.5, "rotary_emb_base": 10000}
    new = {
        "model_type": "gpt_neox",
        "dtype": "float16",
        "rope_parameters": {"partial_rotary_factor": 0.5, "rope_type": "default", "rope_theta": 10000.0},
    }
    assert import_model(old) == import_model(new)
    assert import_model(new).rotary_fraction == 0.5
    assert import_model({"model_type": "gpt_neox"}).rotary_fraction == 0.25
    assert import_model({"model_type": "llama", "torch_dtype": "torch.float32"}).dtype == "float32"


def test_shapes_of_each_family() -> None:
    gpt2 = import_model({"model_type": "gpt2"})
    assert (gpt2.norm, gpt2.position, gpt2.gated_mlp, gpt2.activation) == ("layernorm", "learned", False, "gelu")
    assert (gpt2.max_position_embeddings, gpt2.seq_length, gpt2.ffn_hidden_size) == (1024, 1024, 3072)
    neox = import_model({"model_type": "gpt_neox"})
    assert (neox.parallel_residual, neox.norm, neox.position, neox.gated_mlp) == (True, "layernorm", "rope", False)
    llama = import_model({"model_type": "llama", "num_key_value_heads": 8})
    assert (llama.norm, llama.query_groups, llama.activation, llama.gated_mlp) == ("rmsnorm", 8, "silu", True)
    assert import_model({"model_type": "qwen3"}).qk_norm == "head"
    assert import_model({"model_type": "olmoe"}).qk_norm == "full"
    assert import_model({"model_type": "qwen2"}).qkv_bias
    mixtral = import_model({"model_type": "mixtral"})
    assert mixtral.moe is not None
    assert (mixtral.moe.num_experts, mixtral.moe.top_k, mixtral.moe.norm_topk_prob) == (8, 2, True)
    shared = import_model({"model_type": "qwen2_moe"}).moe
    assert shared is not None
    assert (shared.shared_expert_ffn_hidden_size, shared.shared_expert_gate) == (5632, True)


def test_dense_layers_of_a_mixture_stand_where_transformers_has_them() -> None:
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 6, "mlp_only_layers": [1], "decoder_sparse_step": 2}
    kinds = import_model(config).layer_kinds
    assert [kind is LayerKind.MOE for kind in kinds] == [False, False, False, True, False, True]


def test_a_sequence_is_as_long_as_the_model_reaches_up_to_4096() -> None:
    assert import_model({"model_type": "llama", "max_position_embeddings": 131072}).seq_length == 4096
    assert import_model({"model_type": "llama", "max_position_embeddings": 512}).seq_length == 512
    assert import_model({"model_type": "llama", "seq_length": 8192}).seq_length == 8192
    longer = parse({"model_type": "llama", "seq_length": 64}, **{"model.seq_length": 96})
    assert longer.shapes.seq_length == 96


def test_names() -> None:
    assert import_model({"model_type": "llama"}).name == "llama"
    assert import_model({"model_type": "llama", "_name_or_path": "meta-llama/Llama-3.2-1B"}).name == "Llama-3.2-1B"
    assert import_model({"model_type": "llama", "name": "mine", "_name_or_path": "x/y"}).name == "mine"
    assert import_model({"model_type": "llama", "_name_or_path": "../../.."}).name == "llama"


@pytest.mark.parametrize(
    ("config", "field", "part"),
    [
        ({"model_type": "gemma2"}, "model_type", "soft-capping"),
        ({"model_type": "no_such"}, "model_type", "supported: gpt2"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "model_type", "target 'transformers'"),
        ({"model_type": "llama", "kv_lora_rank": 512}, "kv_lora_rank", "MLA"),
        ({"model_type": "llama", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping", "soft-capped"),
        ({"model_type": "llama", "attention_multiplier": 0.5}, "attention_multiplier", "multiplier"),
        ({"model_type": "llama", "num_nextn_predict_layers": 1}, "num_nextn_predict_layers", "multi-token"),
        ({"model_type": "llama", "quantization_config": {"bits": 4}}, "quantization_config", "quantised"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv", "clipped"),
        ({"model_type": "gpt2", "reorder_and_upcast_attn": True}, "reorder_and_upcast_attn", "float32"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention", "cross attention"),
        ({"model_type": "llama", "an_invention": 3}, "an_invention", "known"),
        ({"model_type": "llama", "hidden_act": "tanh"}, "hidden_act", "supported: silu"),
        ({"model_type": "llama", "torch_dtype": "float8_e4m3fn"}, "torch_dtype", "bfloat16"),
        ({"model_type": "llama", "partial_rotary_factor": 0.5}, "partial_rotary_factor", "partial rotary"),
        ({"model_type": "llama", "num_key_value_heads": 5}, "num_key_value_heads", "divide"),
        ({"model_type": "llama", "num_attention_heads": 33, "num_key_value_heads": 33}, "hidden_size", "multiple"),
        ({"model_type": "llama", "max_position_embeddings": "far"}, "max_position_embeddings", "whole number"),
        ({"model_type": "qwen3_moe", "num_experts": 10**9}, "num_experts", "1023"),
        ({"model_type": "qwen3_moe", "num_hidden_layers": 10**9}, "num_hidden_layers", "4096"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 0}, "decoder_sparse_step", "at least 1"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": "all"}, "mlp_only_layers", "list"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [3]}, "mlp_only_layers", "every n-th layer"),
        ({"model_type": "mixtral", "num_experts": 4, "num_local_experts": 8}, "num_experts", "contradicts"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "num_experts_per_tok", "exceed"),
    ],
)
def test_what_cannot_be_honoured_is_named(config: dict[str, Any], field: str, part: str) -> None:
    errors = refused(config)
    assert part in errors[field,]


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mistral", "seq_length": 8192, "sliding_window": 4096},
        {"model_type": "mistral", "seq_length": 8192},
        {"model_type": "mixtral", "seq_length": 8192, "sliding_window": 4096},
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 10},
        {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 0},
        {"model_type": "qwen3_moe", "use_sliding_window": True, "sliding_window": 1024},
    ],
)
def test_sliding_windows_in_use_are_refused(config: dict[str, Any]) -> None:
    assert "sliding window" in refused(config)["sliding_window",]


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mistral", "seq_length": 4096, "sliding_window": 4096},
        {"model_type": "mistral", "seq_length": 8192, "sliding_window": None},
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 1024},
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 32},
        {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"]},
    ],
)
def test_windows_that_mask_nothing_are_accepted(config: dict[str, Any]) -> None:
    assert import_model(config)


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["ViTModel"], "image_size": 224, "num_hidden_layers": 12},
        {"model": {"model_type": "llava", "vision_config": {}}},
        {"model": {"num_layers": 2, "hidden_size": 64, "patch_size": 16}},
    ],
)
def test_vision_networks_get_their_own_error(config: dict[str, Any]) -> None:
    (message,) = refused(config).values()
    assert "limited to language models" in message or "limited to causal language models" in message
    assert "bexp explore config.json --target examples/targets/hugging_face.py:Target" in message


def test_an_unnamed_config_is_told_what_it_lacks() -> None:
    assert "model_type" in str(refused({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}))


def test_locations_of_a_nested_config_begin_with_model() -> None:
    assert (
        "divide"
        in refused({"model": {"model_type": "llama", "num_key_value_heads": 5}})["model", "num_key_value_heads"]
    )
