"""What is stored of a config.json for target `transformers`: what a class of the library may read to build its layers.

Nobody knows all such keys: the service need not have the library, and a worker's version may be newer. So short values
of any key are kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bexp.explorer.formats.translation import Translation
from bexp.explorer.spec.optimizers import BITSANDBYTES
from bexp.explorer.spec.quantization import own_method
from bexp.explorer.spec.spelling import shortened

UNREAD = frozenset({"id2label", "label2id", "task_specific_params", "custom_pipelines", "finetuning_task"})
"""Keys that no causal language model reads, and that are long in published files."""

LONGEST_TEXT = 256
"""Characters of a key or a text; the longest that a class reads is a pattern of some hundred layers."""

LARGEST_BYTES = 32 * 1024
"""A published file is smaller, without what is left out."""


def keep_what_is_read(config: Mapping[str, Any], translation: Translation) -> None:
    """Leave out of `hf_config` what no measurement reads.

    Long texts are noted, and a file that is large without them is refused. Of a quantisation that is not
    measured, the name of the method stays.
    """
    dropped: list[str] = []
    kept = {
        key: _without_long_texts(value, key, dropped)
        for key, value in config.items()
        if key not in UNREAD and not _is_long(key, key, dropped) and not _is_long(value, key, dropped)
    }
    method = own_method(kept)
    if method not in (None, BITSANDBYTES):
        kept["quantization_config"] = {"quant_method": str(method)[:LONGEST_TEXT]}
    if dropped:
        others = f" and {len(dropped) - 1} more" if len(dropped) > 1 else ""
        translation.notes.append(f"{dropped[0]}{others} of config.json left out: longer than {LONGEST_TEXT} characters")
    sizes = {key: len(json.dumps(value, default=str)) for key, value in kept.items()}
    if sum(sizes.values()) > LARGEST_BYTES:
        largest = max(sizes, key=sizes.__getitem__)
        translation.refuse(
            translation.sources.get(("hf_config",), ("hf_config",)),
            f"config.json is larger than {LARGEST_BYTES // 1024} KiB, without labels and long texts; "
            f"{shortened(largest)} alone has {sizes[largest] / 1024:.0f} KiB: leave out what its class does not read",
        )
    translation.put(("hf_config",), kept)


def _without_long_texts(value: Any, path: str, dropped: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _without_long_texts(inner, f"{path}.{key}", dropped)
            for key, inner in value.items()
            if not _is_long(key, path, dropped) and not _is_long(inner, f"{path}.{key}", dropped)
        }
    if isinstance(value, list | tuple):
        return [_without_long_texts(inner, path, dropped) for inner in value if not _is_long(inner, path, dropped)]
    return value


def _is_long(value: Any, path: str, dropped: list[str]) -> bool:
    """Return whether a text is too long; its place, shortened, is then added to `dropped`."""
    if not isinstance(value, str) or len(value) <= LONGEST_TEXT:
        return False
    dropped.append(shortened(path))
    return True
