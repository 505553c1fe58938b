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
)
from bexp.explorer.exports.document import ExportDocument
from bexp.explorer.exports.exploration import ExportSource, UnknownFormatError
from bexp.explorer.exports.framework import Framework
from bexp.explorer.exports.trainer_settings import TrainerSettings, build_settings
from bexp.explorer.records.recommendation import Recommendation


@dataclass(frozen=True, slots=True)
class Format:
    """A format: what its framework can be told, and the function that writes it."""

    framework: Framework
    render: Callable[[TrainerSettings], ExportDocument]


FORMATS = {
    "transformers": Format(transformers.FRAMEWORK, transformers.render),
    "python": Format(python.FRAMEWORK, python.render),
    "accelerate": Format(accelerate.FRAMEWORK, accelerate.render),
    "deepspeed": Format(deepspeed.FRAMEWORK, deepspeed.render),
    "torchtitan": Format(torchtitan.FRAMEWORK, torchtitan.render_release),
    "torchtitan-main": Format(torchtitan.FRAMEWORK, torchtitan.render_main),
    "megatron": Format(megatron.FRAMEWORK, megatron.render),
    "lightning": Format(lightning.FRAMEWORK, lightning.render),
    "axolotl": Format(axolotl.FRAMEWORK, axolotl.render),
    "llamafactory": Format(llamafactory.FRAMEWORK, llamafactory.render),
    "cerebras": Format(cerebras.FRAMEWORK, cerebras.render),
}


def find_format(name: str) -> Format:
    """Return the format called `name`. Raises UnknownFormatError with the names that there are."""
    if name not in FORMATS:
        raise UnknownFormatError(f"there is no format of this name; the formats are {', '.join(FORMATS)}")
    return FORMATS[name]


def formats_for(recommendation: Recommendation) -> list[str]:
    """Return the names of the formats that can hold an answer.

    Few frameworks can be told the mesh of a plan, or the capacity of experts.
    """
    has_mesh = recommendation.plan is not None and not recommendation.plan.mesh.is_data_parallel
    drops = recommendation.candidate.capacity_factor is not None
    return [
        name
        for name, known in FORMATS.items()
        if (not has_mesh or known.framework.schedules) and (not drops or known.framework.capacity)
    ]


def export(name: str, exploration: ExportSource) -> ExportDocument:
    """Return the file of an exploration's answer in the format called `name`.

    Raises UnknownFormatError if there is no such format, ExportError if there is no answer that a trainer could run.
    """
    found = find_format(name)
    return found.render(build_settings(found.framework, name, exploration))
