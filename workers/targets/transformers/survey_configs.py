"""Values that the survey adds where a class's own defaults do not make a causal language model."""

from __future__ import annotations

from typing import Any

from bexp.workers.targets.transformers.config import UnsupportedModelError, one_line, quiet_library

# Each of these types fails to build or to run with its class's defaults alone.
_MISSING_DEFAULTS: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 8, "first_k_dense_replace": 1},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4},
    "xmod": {"default_language": "en_XX"},
    "reformer": {"axial_pos_shape": [4, 4], "axial_pos_embds_dim": [16, 48], "max_position_embeddings": 16},
}


def survey_config(model_type: str) -> dict[str, Any]:
    """A raw configuration of `model_type`: its class's defaults, as a decoder, with what they lack.

    UnsupportedModelError if the defaults cannot be made.
    """
    from transformers import CONFIG_MAPPING  # noqa: PLC0415 - transformers is optional

    raw: dict[str, Any] = {"model_type": model_type, **_MISSING_DEFAULTS.get(model_type, {})}
    try:
        with quiet_library():
            defaults = CONFIG_MAPPING[model_type]()
    except Exception as error:  # a configuration's own checks raise errors of any kind
        raise UnsupportedModelError(f"the class's defaults are refused: {one_line(error)}") from error
    if getattr(defaults, "is_decoder", None) is False:
        raw["is_decoder"] = True
    return raw
