"""The model types of transformers, for a service that reads a config.json without having the library."""

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
"""The default id of padding of all types `after-padding`."""
DECODERS, BOUNDED, AFTER_PADDING = "decoders", "bounded", "after-padding"


class ModelKind(StrEnum):
    """The kind of a model type."""

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

    `decoders` are encoders, with a decoder or without, that also have a causal class, for `is_decoder: true`. The class
    of `bounded` types has no position after `max_position_embeddings`. The first token of `after_padding` types has the
    position after the id of padding, so that fewer tokens have one.
    """

    version: str
    kinds: dict[str, ModelKind]
    decoders: frozenset[str]
    bounded: frozenset[str]
    after_padding: frozenset[str]


@cache
def model_types() -> ModelTypes:
    """Return the model types in the file."""
    head, *groups = re.split(r"\n(?! )", FILE.read_text(encoding="utf-8").strip())
    named = {title: names.split() for title, _, names in (group.partition(":") for group in groups)}
    others = [frozenset(named.pop(title)) for title in (DECODERS, BOUNDED, AFTER_PADDING)]
    kinds = {name: ModelKind(title) for title, names in named.items() for name in names}
    return ModelTypes(head.removeprefix(VERSION).strip(), kinds, *others)


def reserved_positions(config: Mapping[str, Any]) -> int:
    """Return the number of a config.json's positions that no token has."""
    if str(config.get("model_type")) not in model_types().after_padding:
        return 0
    padding = config.get("pad_token_id")
    return (padding if isinstance(padding, int) and padding >= 0 else PADDING) + 1
