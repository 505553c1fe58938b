"""The kernels for norms, rotation and gated activations of a transformers model."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from bexp.explorer.dimensions.dimension import Choice, CodePart, marked, named
from bexp.explorer.dimensions.execution import EXECUTION
from bexp.explorer.dimensions.place import Place
from bexp.explorer.model.base import Frozen, RuleError
from bexp.explorer.model.target import TRANSFORMERS


class Kernels(StrEnum):
    """The kernels for norms, rotation and gated activations: the model's own, or those of the package liger-kernel.

    The base (1.00x) has the first that a request admits.
    """

    LIBRARY = "library"
    LIGER = "liger"


class KernelsOf(Frozen):
    """The kernels of a candidate."""

    kernels: Kernels | None = Field(None, description="Null: the model's own.")


class KernelsAsked(Frozen):
    """The field of a request about kernels."""

    kernels: Annotated[tuple[Kernels, ...], Field(min_length=1, max_length=len(Kernels))] | None = Field(
        None,
        description="The kernels for norms, rotation and gated activations of a transformers model: its own code, or "
        "the package liger-kernel where it is installed and knows the model. Null: both, where a GPU can have them.",
    )


def _explored(place: Place) -> Sequence[Kernels]:
    return (Kernels.LIBRARY,) if place.is_quick or place.target != TRANSFORMERS else tuple(Kernels)


class KernelsChoice(Choice[Kernels]):
    """The kernels, the model's own first."""

    def check(self, place: Place) -> None:
        """Check that the target has the kernels, and that some execution can use them."""
        named = place.asked.kernels or ()
        if Kernels.LIGER in named and place.target != TRANSFORMERS:
            raise RuleError(f"kernels '{Kernels.LIGER}' need target '{TRANSFORMERS}'", "kernels", "target")
        if named == (Kernels.LIGER,) and EXECUTION.always_compiles(place):
            raise RuleError(
                f"kernels '{Kernels.LIGER}' need execution 'eager' or 'graph': the compiler makes kernels of its own "
                "from the same operations",
                "kernels",
                "execution",
            )


KERNELS = KernelsChoice(
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
