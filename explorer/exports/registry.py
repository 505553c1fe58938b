"""The formats by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bexp.explorer.exports import (
    accelerate,
    axolotl,
    cerebras,
    deepspeed,
    lightning,
    llamafactory,
    megatron,
    python,
    torchtitan,
    transformers,
    trl,
)
from bexp.explorer.exports.document import ExportDocument
from bexp.explorer.exports.exploration import ExportSource, UnknownFormatError
from bexp.explorer.exports.trainer_settings import TrainerSettings, build_settings
from bexp.explorer.trainers.trainer import TRAINERS, TrainerName


@dataclass(frozen=True, slots=True)
class Format:
    """A format: the trainer that reads it, and the function that writes it."""

    trainer: TrainerName
    render: Callable[[TrainerSettings], ExportDocument]


_RENDERERS: dict[str, Callable[[TrainerSettings], ExportDocument]] = {
    "python": python.render,
    "transformers": transformers.render,
    "trl": trl.render,
    "accelerate": accelerate.render,
    "deepspeed": deepspeed.render,
    "torchtitan": torchtitan.render_release,
    "torchtitan-main": torchtitan.render_main,
    "megatron": megatron.render,
    "lightning": lightning.render,
    "axolotl": axolotl.render,
    "llamafactory": llamafactory.render,
    "cerebras": cerebras.render,
}
FORMATS = {name: Format(trainer, _RENDERERS[name]) for trainer, known in TRAINERS.items() for name in known.formats}


def find_format(name: str) -> Format:
    """Return the format called `name`. Raises UnknownFormatError with the names that there are."""
    if name not in FORMATS:
        raise UnknownFormatError(f"there is no format of this name; the formats are {', '.join(FORMATS)}")
    return FORMATS[name]


def export(name: str, exploration: ExportSource) -> ExportDocument:
    """Return the file of an exploration's answer in the format called `name`.

    Raises UnknownFormatError if there is no such format, ExportError if there is no answer that a trainer could run.
    """
    known = find_format(name)
    return known.render(build_settings(known.trainer, name, exploration))
