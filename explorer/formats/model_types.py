"""The model types of transformers, for a service that reads a config.json without having the library.

The config.json of anything but a causal language model is refused by its type, with a way to measure it.
"""

from __future__ import annotations

import re
import shlex
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
WHOLE, TEXTS = "whole", "texts"

TEXT_TWINS = {
    "glm4v_moe_text": "glm4_moe",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_omni_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_omni_moe_text": "qwen3_moe",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3",
}
"""The language models of models that read images or sounds, with the causal type that computes the same on text alone.

Their three positions of a token, in time, height and width, are one and the same there.
"""
TWIN_VALUES: Mapping[str, Mapping[str, Any]] = {"qwen3_moe": {"norm_topk_prob": True}}
"""What a causal type leaves open and its twins always do."""


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
    position after the id of padding, so that fewer tokens have one. `whole` are types that are not causal, and that the
    example of a target builds. `texts` are the types of the language models in others, where not `<type>_text`.
    """

    version: str
    kinds: dict[str, ModelKind]
    decoders: frozenset[str]
    bounded: frozenset[str]
    after_padding: frozenset[str]
    whole: frozenset[str]
    texts: Mapping[str, str]

    def is_causal(self, name: object) -> bool:
        """Return whether a causal class of the library computes what a type does, at least on text alone."""
        return name in TEXT_TWINS or (isinstance(name, str) and self.kinds.get(name) is ModelKind.CAUSAL)


@cache
def model_types() -> ModelTypes:
    """Return the model types in the file."""
    head, *groups = re.split(r"\n(?! )", FILE.read_text(encoding="utf-8").strip())
    named = {title: names.split() for title, _, names in (group.partition(":") for group in groups)}
    titles = (DECODERS, BOUNDED, AFTER_PADDING, WHOLE)
    decoders, bounded, after_padding, whole = (frozenset(named.pop(title)) for title in titles)
    texts = dict(pair.split("=") for pair in named.pop(TEXTS))
    kinds = {name: ModelKind(title) for title, names in named.items() for name in names}
    return ModelTypes(head.removeprefix(VERSION).strip(), kinds, decoders, bounded, after_padding, whole, texts)


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


def refuse_vision(model: Section, name_key: str | None, way: str = OWN_TARGET) -> bool:
    """Refuse a network that takes images, at the field that shows this; return whether it was refused.

    `name_key` is the field that names the kind of network; None if the format has none. `way` measures it.
    """
    shown = next((key for key in VISION_FIELDS if model.values.get(key) is not None), None)
    if shown is None and name_key is not None:
        words = re.split(r"[^a-z]+", str(model.values.get(name_key) or "").lower())
        shown = name_key if VISION_WORDS.intersection(words) else None
    if shown is None:
        return False
    model.refuse(shown, f"this is a vision network; exploration is limited to language models: {way}")
    return True


TEXT_PLACES = (("text_config",), ("thinker_config", "text_config"), ("llm_config",), ("language_config",))
"""Where the configuration of a language model lies in that of a larger model."""
WRITE_A_TARGET = "a target of your own, which you write, measures it whole (docs/targets.md)"
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

    The language model of another model is measured as a causal class that computes the same, which is noted. Encoders
    that have a causal class are causal with `is_decoder: true`. An unknown type is noted, because a worker's library
    may be newer. A misspelt one is noted as well if the request names the `target`.
    """
    config, name = model.values, model.values.get("model_type")
    if not isinstance(name, str):
        return False
    kind = ModelKind.CAUSAL if name in TEXT_TWINS else model_types().kinds.get(name)
    if kind is None:
        way = _text_way(config, name) or OWN_TARGET
        return refuse_vision(model, "model_type", way) or _report_unknown(model, name, target)
    if kind is ModelKind.CAUSAL and config.get("vision_config") is not None:
        kind = ModelKind.VISION_LANGUAGE
    if name in model_types().decoders and config.get("is_decoder") is True:
        kind = ModelKind.ENCODER_DECODER if config.get("is_encoder_decoder") else ModelKind.CAUSAL
    if kind is ModelKind.CAUSAL:
        if name in TEXT_TWINS:
            model.translation.notes.append(
                f"{name} is measured as {TEXT_TWINS[name]}, which computes the same on text alone; the rest of its "
                "model, such as that for images, is not measured"
            )
        return False
    what = f"{shortened(repr(name))} is {_WHAT[kind]}; exploration is limited to causal language models"
    model.refuse("model_type", f"{what}. {_way(config, name, kind)}")
    return True


def _way(config: Mapping[str, Any], name: str, kind: ModelKind) -> str:
    """Return a way to measure the model, or the language model in it."""
    whole = OWN_TARGET if name in model_types().whole else WRITE_A_TARGET
    if text := _text_way(config, name):
        return f"{text}; or {whole}"
    if kind is ModelKind.ENCODER and name in model_types().decoders:
        return f"is_decoder: true makes it one; or {whole}"
    larger = re.sub("_text(_model)?$", "", name)
    if larger != name and larger in model_types().whole:
        return f"Give the whole configuration, of type {larger!r}: {OWN_TARGET}"
    return whole[0].upper() + whole[1:]


def _text_way(config: Mapping[str, Any], name: str) -> str:
    """Return the way to measure the language model in a configuration; empty if there is none."""
    usual = model_types().texts.get(name, f"{name}_text")
    for place in TEXT_PLACES:
        text: Any = config
        for key in place:
            text = text.get(key) if isinstance(text, Mapping) else None
        if isinstance(text, Mapping) and model_types().is_causal(inner := text.get("model_type", usual)):
            path = "." + ".".join(place)
            return f"Its {path[1:]} is one: {_command(path, None if 'model_type' in text else inner)}"
    is_own = model_types().is_causal(name)
    if is_own or ("hidden_size" in config and model_types().is_causal(usual)):
        return f"Its language model is one: {_command('del(.vision_config)', None if is_own else usual)}"
    return ""


def _command(query: str, model_type: str | None) -> str:
    """Return the command that explores what `jq` finds, with a `model_type` if that has none."""
    query += "" if model_type is None else f' + {{model_type: "{model_type}"}}'
    return f"jq {shlex.quote(query)} config.json | bexp explore -"


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
