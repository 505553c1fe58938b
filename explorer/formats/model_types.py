"""The model types of transformers, for a service that reads a config.json without having the library.

The config.json of anything but a causal language model is refused by its type, with a way to measure it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from bexp.explorer.model.spelling import did_you_mean, shortened
from bexp.explorer.model.target import OWN_TARGET, TRANSFORMERS
from bexp.explorer.model.translation import Section

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


VISION_FIELDS = (
    *("vision_config", "vision_model", "image_size", "patch_size", "num_channels", "image_token_id"),
    "image_token_index",
)
VISION_WORDS = frozenset(
    {
        *("vit", "deit", "beit", "dit", "swin", "swinv", "dinov", "dinov2", "hiera", "perceiver"),
        *("clip", "siglip", "align", "blip", "flava", "llava", "paligemma", "pixtral", "mllama", "vl", "idefics"),
        *("resnet", "convnext", "convnextv", "regnet", "efficientnet", "mobilenet", "detr", "segformer", "sam"),
        *("vision", "image", "imagegpt", "unet", "diffusion", "multimodal"),
    }
)


def refuse_vision(model: Section, name_key: str | None) -> bool:
    """Refuse a network that takes images, at the field that shows this; return whether it was refused.

    `name_key` is the field that names the kind of network; None if the format has none.
    """
    shown = next((key for key in VISION_FIELDS if model.values.get(key) is not None), None)
    if shown is None and name_key is not None:
        words = re.split(r"[^a-z]+", str(model.values.get(name_key) or "").lower())
        shown = name_key if VISION_WORDS.intersection(words) else None
    if shown is None:
        return False
    model.refuse(shown, f"this is a vision network; exploration is limited to language models: {OWN_TARGET}")
    return True


LIKE_A_TYPE = 0.8
"""The least likeness of an unknown model type to the known one that it misspells."""

_WHAT = {
    ModelKind.ENCODER: "an encoder",
    ModelKind.ENCODER_DECODER: "an encoder with a decoder",
    ModelKind.VISION_LANGUAGE: "a vision-language model",
    ModelKind.VISION: "a vision network",
    ModelKind.AUDIO: "an audio network",
    ModelKind.OTHER: "no causal language model",
}


def refuse_other_model(model: Section, target: Any = None) -> bool:
    """Refuse the config.json of anything but a causal language model, and a misspelt type; return whether it did.

    Encoders that have a causal class are causal with `is_decoder: true`. An unknown type is noted, because a worker's
    library may be newer. A misspelt one is noted as well if the request names the `target`.
    """
    config, name = model.values, model.values.get("model_type")
    if not isinstance(name, str):
        return False
    kind = model_types().kinds.get(name)
    if kind is None:
        return refuse_vision(model, "model_type") or _report_unknown(model, name, target)
    if kind is ModelKind.CAUSAL and config.get("vision_config") is not None:
        kind = ModelKind.VISION_LANGUAGE
    if name in model_types().decoders and config.get("is_decoder") is True:
        kind = ModelKind.ENCODER_DECODER if config.get("is_encoder_decoder") else ModelKind.CAUSAL
    if kind is ModelKind.CAUSAL:
        return False
    what = f"{shortened(repr(name))} is {_WHAT[kind]}; exploration is limited to causal language models"
    model.refuse("model_type", f"{what}. {_way(config, name, kind)}")
    return True


def _way(config: Mapping[str, Any], name: str, kind: ModelKind) -> str:
    """Return a way to measure the model, or the language model in it."""
    text = config.get("text_config")
    inner = text.get("model_type", f"{name}_text") if isinstance(text, Mapping) else None
    if isinstance(inner, str) and model_types().kinds.get(inner) is ModelKind.CAUSAL:
        query = ".text_config" if "model_type" in (text or {}) else f"'.text_config + {{model_type: \"{inner}\"}}'"
        return f"Its text_config is one: jq {query} config.json | bexp explore -; or {OWN_TARGET}"
    decoder = (
        "is_decoder: true makes it one; or " if kind is ModelKind.ENCODER and name in model_types().decoders else ""
    )
    way = f"{decoder}{OWN_TARGET}"
    return way if decoder else way[0].upper() + way[1:]


def _report_unknown(model: Section, name: str, target: Any) -> bool:
    """Refuse a type that is misspelt, and note another one that is not known; return whether it is refused."""
    known = model_types()
    unknown = f"{shortened(repr(name))} is not known to transformers {known.version}"
    meant = _meant(name, known.kinds)
    if meant and target is None:
        model.refuse("model_type", f"{unknown}{meant}; target: {TRANSFORMERS} leaves it to the worker's library")
        return True
    note = f"model_type {unknown} as far as this version of bexp knows{meant}; a worker's library decides"
    model.translation.notes.append(note)
    return False


def _meant(name: str, known: Mapping[str, ModelKind]) -> str:
    """Return the suggestion of a known type, empty for one that differs in a number, as a newer one does."""
    plain = {re.sub(r"[^a-z0-9]", "", each.lower()): each for each in known}
    same = plain.get(re.sub(r"[^a-z0-9]", "", name.lower()))
    if same is not None:
        return f" (did you mean {same!r}?)"
    letters = {re.sub(r"[^a-z]", "", each.lower()) for each in known}
    return "" if re.sub(r"[^a-z]", "", name.lower()) in letters else did_you_mean(name, known, LIKE_A_TYPE)
