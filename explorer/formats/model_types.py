"""What the model types of transformers are, known without the library: a service that reads a config.json has none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".txt")
"""Written by `python -m benchmarks.model_types`."""
VERSION = "transformers"
PADDING = 1
"""The id of padding that all types `after-padding` have by default."""
DECODERS, BOUNDED, AFTER_PADDING = "decoders", "bounded", "after-padding"


class ModelKind(StrEnum):
    """What a model type is."""

    CAUSAL = "causal"
    ENCODER = "encoder"
    ENCODER_DECODER = "encoder-decoder"
    VISION_LANGUAGE = "vision-language"
    VISION = "vision"
    AUDIO = "audio"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class ModelTypes:
    """The model types of one version of transformers.

    `decoders` are encoders, with a decoder or without, that have a causal class as well, for `is_decoder: true`.
    `bounded` are those whose class has no position after `max_position_embeddings`. `after_padding` are those whose
    first token has the position after the id of padding, so that so many fewer tokens have one.
    """

    version: str
    kinds: dict[str, ModelKind]
    decoders: frozenset[str]
    bounded: frozenset[str]
    after_padding: frozenset[str]


@cache
def model_types() -> ModelTypes:
    """Return what the file says."""
    head, *groups = re.split(r"\n(?! )", FILE.read_text(encoding="utf-8").strip())
    named = {title: names.split() for title, _, names in (group.partition(":") for group in groups)}
    others = [frozenset(named.pop(title)) for title in (DECODERS, BOUNDED, AFTER_PADDING)]
    kinds = {name: ModelKind(title) for title, names in named.items() for name in names}
    return ModelTypes(head.removeprefix(VERSION).strip(), kinds, *others)


def reserved_positions(config: Mapping[str, Any]) -> int:
    """Return how many positions of a config.json no token has."""
    if str(config.get("model_type")) not in model_types().after_padding:
        return 0
    padding = config.get("pad_token_id")
    return (padding if isinstance(padding, int) and padding >= 0 else PADDING) + 1
