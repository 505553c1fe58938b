"""The stored part of a config.json: for target `transformers`, values that a class of the library may build with.

Not all such keys are known: the service need not have the library, and a worker's version may be newer. So short values
of any key are kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bexp.explorer.model.base import FieldPath
from bexp.explorer.model.config_rules import LABELS, LONGEST_TEXT, TOO_LONG, cleaned
from bexp.explorer.model.optimizers import BITSANDBYTES
from bexp.explorer.model.quantization import own_method
from bexp.explorer.model.spelling import shortened
from bexp.explorer.model.translation import Translation

UNREAD = LABELS | {"task_specific_params", "finetuning_task"}
"""Keys that no causal language model reads, and that are long in published files."""

LONG = TOO_LONG
NAMES = "the library's own class is measured, and no code, repository or path is passed to it"

LARGEST_BYTES = 32 * 1024
"""Published files are smaller than this without the values that are left out."""


def keep_what_is_read(config: Mapping[str, Any], translation: Translation, *, by_library: bool) -> None:
    """Leave out of `hf_config` names of code, of a repository or of a path, and long texts; note both.

    `auto_map` names the code of a model that was published before the library had its class. The worker builds the
    library's class of the same `model_type`, or reports that the library has none.

    For target `transformers`, values that no measurement reads are left out as well, and a file that is large without
    them is refused. Of a quantisation that is not measured, the name of the method stays.
    """
    kept = {key: value for key, value in config.items() if not by_library or key not in UNREAD}
    method = own_method(kept)
    if by_library and method not in (None, BITSANDBYTES):
        kept["quantization_config"] = {"quant_method": None if method == "?" else str(method)[:LONGEST_TEXT]}
    left_out: dict[str, dict[str, None]] = {LONG: {}, NAMES: {}}

    def note(path: FieldPath, reason: str) -> None:
        left_out[LONG if reason == TOO_LONG else NAMES][".".join(map(str, path))] = None

    kept = cleaned(kept, note)
    for reason, places in left_out.items():
        if places:
            others = f" and {len(places) - 1} more" if len(places) > 1 else ""
            translation.notes.append(f"{shortened(next(iter(places)))}{others} of config.json left out: {reason}")
    if by_library:
        _refuse_large(kept, translation)
    translation.put(("hf_config",), kept)


def _refuse_large(config: Mapping[str, Any], translation: Translation) -> None:
    sizes = {key: len(json.dumps(value, default=str)) for key, value in config.items()}
    if sum(sizes.values()) > LARGEST_BYTES:
        largest = max(sizes, key=sizes.__getitem__)
        translation.refuse(
            translation.sources.get(("hf_config",), ("hf_config",)),
            f"config.json is larger than {LARGEST_BYTES // 1024} KiB, without labels and long texts; "
            f"{shortened(largest)} alone has {sizes[largest] / 1024:.0f} KiB: leave out what its class does not read",
        )
