"""What every model type of the installed transformers is, for a service that has no such library.

`python -m benchmarks.model_types` writes explorer/formats/model_types.txt.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import bexp.explorer.formats.model_types as read
from bexp.explorer.formats.model_types import PADDING, ModelKind
from bexp.workers.targets.transformers.config import (
    ResolvedConfig,
    UnsupportedModelError,
    library_version,
    resolve_config,
)
from bexp.workers.targets.transformers.resolved import MORE_TOKENS, TINY_POSITIONS, failure_with

FEWER_TOKENS = 12
"""Tokens that a model with TINY_POSITIONS takes: some types keep positions for themselves."""
_ENCODERS = ("MASKED_LM", "TEXT_ENCODING")
_SEQUENCES = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")
_VISION_LANGUAGE = ("IMAGE_TEXT_TO_TEXT", "VISUAL_QUESTION_ANSWERING", "ZERO_SHOT_IMAGE_CLASSIFICATION")
_EXAMPLE = (*_ENCODERS[:1], *_SEQUENCES, *_VISION_LANGUAGE[::2], "IMAGE_CLASSIFICATION", "CAUSAL_LM")
"""The tasks of `examples/targets/hugging_face.py`."""
_VISION = (
    *("IMAGE", "IMAGE_CLASSIFICATION", "IMAGE_SEGMENTATION", "IMAGE_TO_IMAGE", "MASKED_IMAGE_MODELING", "BACKBONE"),
    *("OBJECT_DETECTION", "ZERO_SHOT_OBJECT_DETECTION", "SEMANTIC_SEGMENTATION", "UNIVERSAL_SEGMENTATION"),
    *("INSTANCE_SEGMENTATION", "DEPTH_ESTIMATION", "MASK_GENERATION", "VIDEO_CLASSIFICATION", "TEXT_RECOGNITION"),
)
_AUDIO = ("AUDIO_CLASSIFICATION", "CTC", "RNNT", "TDT", "TEXT_TO_WAVEFORM", "TEXT_TO_SPECTROGRAM", "AUDIO_XVECTOR")


def main() -> None:
    Path(read.FILE).write_text(render())


def render() -> str:
    """Return the text of the file: a line of names for each kind, wrapped."""
    kinds = find_kinds()
    decoders = [name for name, kind in kinds.items() if kind in (ModelKind.CAUSAL, ModelKind.ENCODER)]
    groups = {kind.value: [name for name, found in kinds.items() if found is kind] for kind in ModelKind}
    encoders = [name for name, kind in kinds.items() if kind in (ModelKind.ENCODER, ModelKind.ENCODER_DECODER)]
    groups[read.DECODERS] = list(_served(["CAUSAL_LM"]).intersection(encoders))
    groups[read.BOUNDED] = find_tiny(decoders, ends_at_its_positions)
    groups[read.AFTER_PADDING] = find_tiny(groups[read.BOUNDED], starts_after_padding)
    groups[read.WHOLE] = [n for n in _served(_EXAMPLE) if kinds.get(n, ModelKind.CAUSAL) is not ModelKind.CAUSAL]
    groups[read.TEXTS] = [f"{name}={text}" for name, text in find_texts(kinds).items()]
    lines = [f"{read.VERSION} {library_version()}"]
    for title, names in groups.items():
        lines += textwrap.wrap(
            " ".join([f"{title}:", *sorted(names)]),
            118,
            subsequent_indent="  ",
            break_on_hyphens=False,
            break_long_words=False,
        )
    return "\n".join(lines) + "\n"


def find_kinds() -> Mapping[str, ModelKind]:
    """Return the kind of each type by the library's own tables of classes."""
    from transformers import CONFIG_MAPPING  # noqa: PLC0415 - transformers is optional

    causal, sequences, encoders = _served(["CAUSAL_LM"]), _served(_SEQUENCES), _served(_ENCODERS)
    pictures, vision, audio = _served(_VISION_LANGUAGE), _served(_VISION), _served(_AUDIO)

    def kind_of(name: str) -> ModelKind:
        words = set(name.replace("-", "_").split("_"))
        if name in pictures:
            return ModelKind.VISION_LANGUAGE
        if name in sequences:
            return ModelKind.ENCODER_DECODER
        if name in encoders or (name in causal and "bert" in words and "decoder" not in words):
            return ModelKind.ENCODER
        if name in causal:
            return ModelKind.CAUSAL
        if name in audio or "audio" in words:
            return ModelKind.AUDIO
        if name in vision or words & {"vision", "video"}:
            return ModelKind.VISION
        return ModelKind.OTHER

    return {name: kind_of(name) for name in sorted(CONFIG_MAPPING.keys())}


def find_texts(kinds: Mapping[str, ModelKind]) -> dict[str, str]:
    """Return the type of the language model in each type that has one of another name, where it is causal."""
    from transformers import CONFIG_MAPPING  # noqa: PLC0415 - transformers is optional

    found = {}
    for name in kinds:
        if "text_config" in getattr(CONFIG_MAPPING[name], "sub_configs", {}):
            text = ""
            with suppress(Exception):  # some classes refuse their own defaults, with errors of any kind
                text = CONFIG_MAPPING[name]().text_config.model_type
            if text != f"{name}_text" and kinds.get(text) is ModelKind.CAUSAL:
                found[name] = text
    return found


def _served(tasks: Iterable[str]) -> set[str]:
    """Return the types that have a class for one of the tasks."""
    from transformers.models.auto import modeling_auto  # noqa: PLC0415 - transformers is optional

    return {name for task in tasks for name in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")}


def find_tiny(names: Iterable[str], holds: Callable[[ResolvedConfig], bool]) -> list[str]:
    """Return the types of which something holds that is tried at a tiny size."""
    found = []
    for name in names:
        try:
            resolved = resolve_config({"model_type": name, "is_decoder": True}, 1)
            if holds(resolved):
                found.append(name)
        except UnsupportedModelError:
            continue  # it has no causal language model, or none at a tiny size
        sys.stderr.write(f"{name}\n")
    return found


def ends_at_its_positions(resolved: ResolvedConfig) -> bool:
    """Whether the class runs as many tokens as it has positions, and no more: a tiny model of the type shows it."""
    stated = getattr(resolved.text_config, "max_position_embeddings", None)
    return (
        isinstance(stated, int)
        and not failure_with(resolved, FEWER_TOKENS)
        and bool(failure_with(resolved, MORE_TOKENS))
    )


def starts_after_padding(resolved: ResolvedConfig) -> bool:
    """Whether the first token's position is the one after the id of padding: a tiny model of the type shows it."""
    padding = getattr(resolved.text_config, "pad_token_id", None)
    if padding != PADDING or not failure_with(resolved, TINY_POSITIONS):
        return False
    return not failure_with(resolved, TINY_POSITIONS - PADDING - 1)


if __name__ == "__main__":
    main()
