"""Recognises vision networks, so that they are refused with a reason of their own."""

from __future__ import annotations

import re

from bexp.explorer.model.target import OWN_TARGET
from bexp.explorer.model.translation import Section

VISION_FIELDS = (
    "vision_config",
    "vision_model",
    "image_size",
    "patch_size",
    "num_channels",
    "image_token_id",
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
