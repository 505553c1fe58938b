"""The same type of model at a size that a CPU checks in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from bexp.workers.targets.transformers.config import ResolvedConfig, UnsupportedModelError, with_values
from bexp.workers.targets.transformers.model import META, BuildSettings, build_model
from bexp.workers.targets.transformers.shrink import shrink

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
