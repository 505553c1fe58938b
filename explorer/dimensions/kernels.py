"""What computes norms, rotation and gated activations of a transformers model."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from bexp.explorer.dimensions.dimension import Choice, CodePart, Place, marked, named
from bexp.explorer.model.base import Frozen
from bexp.explorer.model.target import TRANSFORMERS


class Kernels(StrEnum):
    """What computes norms, rotation and gated activations: the model's own code, or the package liger-kernel.

    The base (1.00x) has the first that a request admits.
    """

    LIBRARY = "library"
    LIGER = "liger"


class KernelsOf(Frozen):
    """The kernels of a candidate."""

    kernels: Kernels | None = Field(None, description="Null: the model's own.")


class KernelsAsked(Frozen):
    """What a request says of kernels."""

    kernels: Annotated[tuple[Kernels, ...], Field(min_length=1, max_length=len(Kernels))] | None = Field(
        None,
        description="What computes norms, rotation and gated activations of a transformers model: its own code, or the "
        "package liger-kernel where it is installed and knows the model. Null: both, where a GPU can have them.",
    )


def _explored(place: Place) -> Sequence[Kernels]:
    return (Kernels.LIBRARY,) if place.is_quick or place.target != TRANSFORMERS else tuple(Kernels)


KERNELS: Choice[Kernels] = Choice(
    name="kernels",
    fields=("kernels",),
    asked="kernels",
    values=tuple(Kernels),
    plain=Kernels.LIBRARY,
    explored=_explored,
    words=lambda kernels: f"the kernels of {kernels}",
    part=CodePart.LAYER,
    settings=lambda kernels: {"kernels": kernels.value},
    is_tried=lambda kernels: kernels is not Kernels.LIBRARY,
    **marked({"liger": Kernels.LIGER}),
    **named("kernels", "kernels"),
)
