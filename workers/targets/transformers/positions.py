"""Whether a model has positions for a sequence of a given length."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from bexp.workers.targets.transformers.batch import make_batch
from bexp.workers.targets.transformers.config import (
    ResolvedConfig,
    UnsupportedModelError,
    one_line,
    quiet_library,
    with_values,
)
from bexp.workers.targets.transformers.model import BuildSettings, build_model
from bexp.workers.targets.transformers.shrink import shrink

_LIMIT = 16  # positions of the tiny model
_LONGER = 24  # tokens that it is given


def require_positions(resolved: ResolvedConfig) -> None:
    """UnsupportedModelError if the sequence is longer than `max_position_embeddings` and the class cannot run it.

    A class with a table of positions fails there; one with rotary positions or none runs on. A tiny model of the type
    shows which it is.
    """
    stated = getattr(resolved.text_config, "max_position_embeddings", None)
    if not isinstance(stated, int) or resolved.seq_length <= stated:
        return
    reason = _failure_of_longer(resolved)
    if reason is not None:
        raise UnsupportedModelError(
            f"seq_length {resolved.seq_length} is longer than max_position_embeddings {stated}, and "
            f"{resolved.model_class.__name__} has no further positions: {reason}"
        )


def _failure_of_longer(resolved: ResolvedConfig) -> str | None:
    config = with_values(resolved.config, _with_limit(shrink(resolved.config.to_dict(), 2), resolved.config))
    tiny = replace(resolved, config=config, seq_length=_LONGER)
    cpu = torch.device("cpu")
    model = build_model(tiny, BuildSettings(dtype=torch.float32), cpu)
    try:
        with quiet_library(), torch.no_grad():
            model(**make_batch(config, 1, _LONGER, cpu), use_cache=False)
    except Exception as error:  # noqa: BLE001 - whatever the model's code raises is the reason
        return one_line(error)
    return None


def _with_limit(values: dict[str, Any], config: Any) -> dict[str, Any]:
    """`values` with `_LIMIT` positions, by the class's own name for them, also in a nested text configuration."""
    text_config = config.get_text_config(decoder=True)
    name = getattr(text_config, "attribute_map", {}).get("max_position_embeddings", "max_position_embeddings")
    limited = {key: dict(value) if isinstance(value, dict) else value for key, value in values.items()}
    for part in [limited, *(value for value in limited.values() if isinstance(value, dict))]:
        if isinstance(part.get(name), int):
            part[name] = _LIMIT
    return limited
