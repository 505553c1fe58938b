"""The same type of model at a size that a CPU checks in seconds: the first layers, small sizes, the rest as it is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from bexp.transformers.layers import DEPTH_NAMES, depth_of
from bexp.workers.targets.transformers.config import ResolvedConfig, UnsupportedModelError, is_int, with_values
from bexp.workers.targets.transformers.model import META, BuildSettings, build_model

TINY_SEQ_LENGTH = 16  # longer than the windows of a shrunk configuration, so that masks differ
_FEWEST_LAYERS = 4
_MOST_LAYERS = 12


def tiny_config(resolved: ResolvedConfig, kinds: Sequence[str] = ()) -> ResolvedConfig:
    """Return `resolved` with small sizes and the first layers, enough of them to have every kind that `kinds` names.

    `kinds` is the kind of each layer of the full model. At most twelve layers are kept. Raises UnsupportedModelError if
    the class refuses the small sizes.
    """
    values = shrink(resolved.config.to_dict(), num_layers_for(kinds))
    derived = {name: value for name, value in values.items() if name != "rope_parameters"}
    try:
        return _buildable(resolved, values)
    except UnsupportedModelError:
        if derived == values:
            raise
        return _buildable(resolved, derived)  # a class may state rotary parameters only in its own defaults


def num_layers_for(kinds: Sequence[str]) -> int:
    """Return how many of the first layers have every kind, from four to twelve."""
    firsts = [kinds.index(kind) for kind in set(kinds)]
    return min(max([_FEWEST_LAYERS, *(first + 1 for first in firsts)]), _MOST_LAYERS)


def _buildable(resolved: ResolvedConfig, values: dict[str, Any]) -> ResolvedConfig:
    tiny = replace(resolved, config=with_values(resolved.config, values), seq_length=TINY_SEQ_LENGTH)
    build_model(tiny, BuildSettings(dtype=torch.float32), META)
    return tiny


_WIDTH = 64
_HEAD_DIM = 16
_VOCABULARY = 128

# The first pattern that matches a field's whole name gives its size. A size that is smaller already stays.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"(task_)?type_vocab_size", 2),
    (r"ngram_vocab_size_base", 64),
    (r"split_ngram_parts|make_ngram_vocab_size_divisible_by", 8),
    (r".*vocab.*", _VOCABULARY),
    (r"hidden_size_per_layer_input|ple_embed_dim|router_hidden_size|laurel_rank|hc_lowrank", 16),
    (r"n_mamba_heads", 2),
    (r"mamba_(n|num)_heads", 8),
    (r"mamba_d_ssm", 2 * _WIDTH),
    (r".*num_key_value_heads(_per_layer)?|num_kv_heads|linear_num_key_heads|num_global_key_value_heads", 2),
    (r"num_query_groups|n_heads?|num_heads|.*attention_heads(_per_layer)?|.*num_(value_)?heads|index_n_heads", 4),
    (r"qk_rope_head_dim|rotary_dim", 8),
    (r".*head_?dim|kv_channels|attention_head_size|d_head|dim_head|d_kv", _HEAD_DIM),
    (r"(moe|expert|shared|moe_shared)_?(experts?)?_(ffn_)?(intermediate|hidden)_size", 32),
    (r".*intermediate_size.*|.*ffn.*|dff|dim_ff|d_inner|feed_forward_size|n_inner", 2 * _WIDTH),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|moe_top_k|top_k_experts", 2),
    (r"(.*_)?(num|n)_(routed_|local_|total_)?experts|zero_expert_num", 8),
    (r"n_group|num_expert_group|o_groups|n_groups|mamba_n_?groups", 2),
    (r"topk_group", 1),
    (r"time_step_rank|mamba_dt_rank", 4),
    (r".*rank", 16),
    (r".*(d_state|state_size)", 16),
    (r"index_topk|.*chunk_size|.*chunk_length|index_block_size|block_size", 8),
    (r"sliding_window|.*window.*size|window_size|.*window_len|local_attention", 8),
    (r"original_max_position_embeddings", 128),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length|model_max_length|max_.*positions", 256),
)
_PATTERNS = tuple((re.compile(pattern), size) for pattern, size in _SIZES)
_AS_IT_IS = re.compile(r".*(_idx|_index|seed|interval|period|offset|pattern|every.*|multiple.*|scale|floor|buckets)")
_TOKEN_ID = re.compile(r".*(token_id|_token_index|pad_index|unk_index|mask_index|_token)")
_LAST_LAYER = re.compile(r"max_window_layers|moe_layer_end_index")
_LEFT_OUT = re.compile(
    r"auto_map|architectures|quantization_config|(torch_)?dtype|_name_or_path|id2label|label2id|transformers_version"
    r"|task_specific_params|qk_head_dim|_attn_implementation.*|_experts_implementation.*"
)
_WIDTH_NAMES = ("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim")


def shrink(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Return `raw` (a configuration as a dict) with at most `num_layers` layers and small sizes, in every nested part.

    The first layers are kept, so `num_layers` decides which kinds there are. Dropouts and jitter become zero,
    token ids fit the vocabulary, and head counts keep their grouping. The result is for the same configuration class.
    """
    depth = depth_of(raw)
    shrunk: dict[str, Any] = {}
    for name, value in raw.items():
        if not _LEFT_OUT.fullmatch(name):
            shrunk[name] = _value(name, value, raw, depth, num_layers)
    _fit_heads(raw, shrunk)
    _fit_state_space(shrunk)
    _fit_rotary(shrunk)
    return shrunk


def _value(name: str, value: Any, raw: Mapping[str, Any], depth: int | None, num_layers: int) -> Any:
    if isinstance(value, Mapping):
        return _mapping(name, value, num_layers)
    if isinstance(value, (list, tuple)):
        return _sequence(name, value, raw, depth, num_layers)
    if isinstance(value, float) and ("drop" in name or "jitter" in name):
        return 0.0
    if not is_int(value):
        return value
    return _size(name, value, raw, num_layers)


def _mapping(name: str, value: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    if name == "per_layer_config":
        return {layer: shrink(inner, num_layers) for layer, inner in value.items() if int(layer) < num_layers}
    if name.startswith("rope"):
        return {key: dict(inner) if isinstance(inner, Mapping) else inner for key, inner in value.items()}
    return shrink(value, num_layers)


def _sequence(name: str, value: Any, raw: Mapping[str, Any], depth: int | None, num_layers: int) -> Any:
    if _TOKEN_ID.fullmatch(name):
        return [min(token, _VOCABULARY - 1) for token in value]
    if depth is not None and len(value) == depth:
        return [_value(name, one, raw, depth, num_layers) for one in value[:num_layers]]
    if name.endswith(("layers", "layer_ids", "idxs")) and all(is_int(one) for one in value):
        return [one for one in value if one < num_layers]
    return [dict(one) if isinstance(one, Mapping) else one for one in value]


def _size(name: str, value: int, raw: Mapping[str, Any], num_layers: int) -> int:
    if _TOKEN_ID.fullmatch(name):
        return min(value, _VOCABULARY - 1)
    if DEPTH_NAMES.fullmatch(name):
        return min(value, num_layers)
    if _LAST_LAYER.fullmatch(name) or name == "num_kv_shared_layers":
        return min(value, num_layers - 1 if _LAST_LAYER.fullmatch(name) else num_layers // 2)
    if _AS_IT_IS.fullmatch(name):
        return value
    for pattern, size in _PATTERNS:
        if pattern.fullmatch(name):
            return min(value, size)
    width: int | None = next((raw[key] for key in _WIDTH_NAMES if is_int(raw.get(key))), None)
    if width is None or value < _WIDTH or width <= _WIDTH:
        return min(value, _WIDTH) if name in _WIDTH_NAMES else value
    return max(value * _WIDTH // width // 8, 1) * 8  # a size that scales with the width, a multiple of 8


def _fit_heads(raw: Mapping[str, Any], shrunk: dict[str, Any]) -> None:
    """Set as many key and value heads as query heads, where the full configuration has that."""
    heads = next((name for name in ("num_attention_heads", "n_heads", "num_heads") if is_int(raw.get(name))), None)
    for name in ("num_key_value_heads", "num_kv_heads", "num_query_groups"):
        if heads is not None and name in raw and raw[name] in (None, raw[heads]):
            shrunk[name] = shrunk[heads]
    if "head_dim" in raw and raw["head_dim"] is None:
        shrunk["head_dim"] = _HEAD_DIM
    if "qk_rope_head_dim" in raw and raw.get("head_dim") == raw["qk_rope_head_dim"]:
        shrunk["head_dim"] = shrunk["qk_rope_head_dim"]
    nope, rope = raw.get("qk_nope_head_dim"), raw.get("qk_rope_head_dim")
    if is_int(nope) and is_int(rope) and raw.get("head_dim") == nope + rope:
        shrunk["head_dim"] = shrunk["qk_nope_head_dim"] + shrunk["qk_rope_head_dim"]


def _fit_state_space(shrunk: dict[str, Any]) -> None:
    """Set as many state-space heads as the expanded width holds."""
    for heads, head_dim, expand in (
        ("mamba_n_heads", "mamba_d_head", "mamba_expand"),
        ("mamba_num_heads", "mamba_head_dim", "expand"),
        ("num_heads", "head_dim", "expand"),
        ("n_mamba_heads", "mamba_headdim", "mamba_expand"),
    ):
        if all(is_int(shrunk.get(name)) for name in (heads, head_dim, expand)):
            width = shrunk.get("mamba_d_ssm") or shrunk["hidden_size"] * shrunk[expand]
            shrunk[heads] = width // shrunk[head_dim]


def _fit_rotary(shrunk: dict[str, Any]) -> None:
    """Give lists of rotary factors and sections the length or the sum that the smaller head needs."""
    for name in ("rope_parameters", "rope_scaling"):
        rotary = shrunk.get(name)
        if not isinstance(rotary, dict):
            continue
        partial = rotary.get("partial_rotary_factor") or shrunk.get("partial_rotary_factor") or 1.0
        head_dim = shrunk.get("head_dim") or _HEAD_DIM
        half = max(int(head_dim * partial) // 2, 1)
        for key in ("long_factor", "short_factor"):
            if isinstance(rotary.get(key), list):
                rotary[key] = rotary[key][:half]
        sections = rotary.get("mrope_section")
        if isinstance(sections, list):
            rotary["mrope_section"] = _sections(len(sections), half)
        if is_int(rotary.get("original_max_position_embeddings")):
            rotary["original_max_position_embeddings"] = min(rotary["original_max_position_embeddings"], 128)


def _sections(count: int, total: int) -> list[int]:
    return [total // count + (1 if index < total % count else 0) for index in range(count)]
