"""The text of an export, and the forms of its header and comments."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import yaml

from bexp.explorer.trainers.settings import TrainerSettings

ALLOCATOR_VARIABLE = "PYTORCH_ALLOC_CONF"

OF_THE_CODE = frozenset(
    {
        *("bf16", "fp16", "bfloat16", "float16", "pure_bf16", "torch_autocast", "mixed_precision", "torch_compile"),
        *("activation_checkpointing", "gradient_checkpointing", "disable_gradient_checkpointing"),
    }
)
"""Fields of precision, compilation and recomputation. A person's own target decides them by itself."""

WHAT_ELSE = "and what decides the learning"
"""The end of the line that lists the missing parts of a configuration."""


class ExportError(ValueError):
    """There is nothing to export yet, or nothing that a trainer could run; the message names what is missing."""


@dataclass(frozen=True, slots=True)
class ExportDocument:
    """A file."""

    text: str
    media_type: str
    header: tuple[str, ...]
    """For people."""
    has_header: bool = True
    """Whether the text holds the header as comments."""


Render = Callable[[TrainerSettings], ExportDocument]


def json_export(settings: TrainerSettings, values: dict[str, Any], notes: Iterable[str] = ()) -> ExportDocument:
    """Return a JSON file. Its parser takes no comments and no unknown keys, so the header is not in the file."""
    text = json.dumps(decided_fields(settings, values), indent=2, allow_nan=False) + "\n"
    return ExportDocument(text, "application/json", (*settings.header, *notes), has_header=False)


def yaml_export(settings: TrainerSettings, values: dict[str, Any], notes: Iterable[str] = ()) -> ExportDocument:
    """Return a YAML file under its header."""
    header = (*settings.header, *notes)
    text = f"{comments(header)}{yaml.safe_dump(decided_fields(settings, values), sort_keys=False)}"
    return ExportDocument(text, "application/yaml", header)


def python_export(settings: TrainerSettings, code: str, notes: Iterable[str] = ()) -> ExportDocument:
    """Return Python code under its header; the allocator is set first, because it is read when CUDA starts."""
    header = (*settings.header, *notes)
    setting = ""
    if settings.allocator is not None:
        setting = f'import os\n\nos.environ["{ALLOCATOR_VARIABLE}"] = "{settings.allocator}"\n\n'
    return ExportDocument(f"{comments(header)}{setting}{code}", "text/x-python", header)


def shell_export(
    settings: TrainerSettings, variable: str, flags: Iterable[tuple[str, ...]], notes: Iterable[str] = ()
) -> ExportDocument:
    """Return a file for a shell to source, with an array `variable` of flags, one with its values on each line."""
    header = (*settings.header, *notes)
    setting = f"export {ALLOCATOR_VARIABLE}={settings.allocator}\n" if settings.allocator is not None else ""
    lines = "".join(f"  {shlex.join(flag)}\n" for flag in flags)
    return ExportDocument(f"{comments(header)}{setting}{variable}=(\n{lines})\n", "text/x-shellscript", header)


def comments(lines: Iterable[str]) -> str:
    """Return lines as comments, without characters that would end a comment's line."""
    return "".join(f"# {' '.join(line.split())}\n" for line in lines)


def decided_fields(settings: TrainerSettings, values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that have a value; a framework keeps its own setting of a field that is left out."""
    return {key: value for key, value in values.items() if not (settings.is_own_code and key in OF_THE_CODE)}
