"""Values of settings as text, and where they stand in braces in a command.

`APPLY` is the setting for `bexp.apply`. Its values are names of APPLIED, joined by a plus.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import chain, combinations
from typing import Any

from bexp.transformers.settings import Settings

APPLY = "bexp_apply"
APPLIED: dict[str, dict[str, Any]] = {
    "experts": {"experts": "bexp_fused"},
    "loss": {"loss": "chunked"},
    "compile": {"compile": True},
}
APPLY_VALUES = ["none", *("+".join(each) for n in range(1, len(APPLIED) + 1) for each in combinations(APPLIED, n))]

_CONSTANTS = {"true": True, "false": False, "null": None, "~": None}


def settings_of(value: str) -> Settings:
    """Return the settings of a value of APPLY; `none` sets nothing."""
    named = [] if value == "none" else value.split("+")
    return Settings(**dict(chain.from_iterable(APPLIED[name].items() for name in named)))


def apply_lines(value: str, size: int) -> list[str]:
    """Return the lines of Python that apply a value of APPLY in a script, as the trial did."""
    named = [] if value == "none" else value.split("+")
    given = ", ".join(f"{field}={setting!r}" for name in named for field, setting in APPLIED[name].items())
    setup = f"bexp.RecommendedSetup(bexp.Settings({given}), micro_batch_size={size})"
    return ["import bexp", f"bexp.apply(trainer.model, {setup})"] if named else []


def scalar_of(text: str) -> Any:
    """Return a text as a plain value of YAML 1.2: a number, True, False, None, or else the text itself."""
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    if re.fullmatch(r"[-+]?\d+", text):
        return int(text)
    return float(text) if re.fullmatch(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?", text) else text


def text_of(value: Any) -> str:
    """Return a value as a command or a file of settings writes it: `true`, `8`, `adafactor`."""
    return value if isinstance(value, str) else json.dumps(value)


def describe_choice(choice: Mapping[str, Any]) -> str:
    """Return the value of each setting, in one line by which the search identifies the choice."""
    return " ".join(f"{name}={text_of(value)}" for name, value in choice.items())


def stands_in(name: str, arguments: Sequence[str]) -> bool:
    """Return whether a setting stands in braces in a command."""
    return any(f"{{{name}}}" in argument for argument in arguments)


def fill(arguments: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """Return the arguments with values in place of their names in braces."""
    filled = list(arguments)
    for name, value in values.items():
        filled = [argument.replace(f"{{{name}}}", text_of(value)) for argument in filled]
    return filled


FIXED_SIZES = (
    "takes its sizes when TrainingArguments are made: put {micro_batch_size} and {grad_accum_steps} where the command "
    "takes them"
)


def owner_of_sizes(arguments: Any) -> str | None:
    """Return the class that has already computed values from the sizes of these arguments; None if they can be set."""
    engines = ("hf_deepspeed_config", "deepspeed_plugin")  # of their own JSON, and of `accelerate launch`
    if any(getattr(arguments, name, None) is not None for name in engines):
        return "DeepSpeed"
    return type(arguments).__name__ if hasattr(arguments, "steps_per_generation") else None  # TRL's GRPO and RLOO
