"""What the model types of transformers are, known without the library: a service that reads a config.json has none."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_suffix(".txt")
"""Written by `python -m bexp.workers.targets.transformers.model_types`."""
VERSION = "transformers"
BOUNDED = "bounded"


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

    `bounded` are those whose class has no position after `max_position_embeddings`.
    """

    version: str
    kinds: dict[str, ModelKind]
    bounded: frozenset[str]


@cache
def model_types() -> ModelTypes:
    """Return what the file says."""
    head, *groups = re.split(r"\n(?! )", FILE.read_text(encoding="utf-8").strip())
    named = {title: names.split() for title, _, names in (group.partition(":") for group in groups)}
    bounded = frozenset(named.pop(BOUNDED))
    kinds = {name: ModelKind(title) for title, names in named.items() for name in names}
    return ModelTypes(head.removeprefix(VERSION).strip(), kinds, bounded)
