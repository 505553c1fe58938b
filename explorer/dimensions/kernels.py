"""What computes norms, rotation and gated activations of a transformers model."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from bexp.explorer.dimensions.dimension import Dimension, named
from bexp.explorer.model.base import Frozen


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


KERNELS = Dimension(name="kernels", fields=("kernels",), asked="kernels", **named("kernels", "kernels"))
