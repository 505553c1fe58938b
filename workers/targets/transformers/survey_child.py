"""One model type of the survey, from its class's defaults to a line of JSON."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from bexp.workers.targets.transformers.config import UnsupportedModelError, one_line, quiet_library, resolve_config
from bexp.workers.targets.transformers.feature_checks import find_experts
from bexp.workers.targets.transformers.kinds import find_layers, kind_names
from bexp.workers.targets.transformers.model import META, BuildSettings, build_model
from bexp.workers.targets.transformers.self_check import FEATURES, self_check
from bexp.workers.targets.transformers.tiny import TINY_SEQ_LENGTH, tiny_config

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


def survey_type(model_type: str) -> dict[str, Any]:
    """What one type can do: its class, whether it runs by parts, whole or not, and why a feature is missing."""
    started = time.monotonic()
    row: dict[str, Any] = {"model_type": model_type, "status": "not"}
    try:
        row |= _checked(model_type)
    except UnsupportedModelError as error:
        row["reason"] = error.reason
    except Exception as error:  # noqa: BLE001 - whatever a model's code raises is the row's reason
        row["reason"] = one_line(error)
    row["seconds"] = round(time.monotonic() - started, 1)
    return row


def main() -> None:
    """Reads model types from the standard input, one a line, and writes a row of JSON for each."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(survey_type(line.strip())) + "\n")
        sys.stdout.flush()


def _checked(model_type: str) -> dict[str, Any]:
    resolved = resolve_config(survey_config(model_type), TINY_SEQ_LENGTH)
    row: dict[str, Any] = {"model_class": resolved.model_class.__name__}
    kinds: list[str] = []
    try:
        meta = build_model(resolved, BuildSettings(), META)
        kinds = kind_names(find_layers(meta), meta.config)
    except UnsupportedModelError as error:
        row["defaults"] = error.reason  # a class whose defaults fail may still build at small sizes
    tiny = tiny_config(resolved, kinds)
    check = self_check(tiny)
    row["failures"] = dict(check.failures)
    if not check.runs:
        return row | {"status": "not", "reason": check.failures["runs"]}
    model = build_model(tiny, BuildSettings(), META)
    row["kinds"] = list(dict.fromkeys(check.kinds))
    row["features"] = [name for name in FEATURES if name not in check.failures]
    row["has_experts"] = bool(find_experts(model))
    row["tied_weights"] = _is_tied(model)
    return row | {"status": "parts" if check.by_parts else "whole"}


def _is_tied(model: Any) -> bool:
    everything = len(list(model.named_parameters(remove_duplicate=False)))
    return everything > len(list(model.named_parameters()))


if __name__ == "__main__":
    main()
