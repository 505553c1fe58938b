"""The kernels for norms, rotation and gated activations of a transformers model."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from bexp.explorer.dimensions.dimension import Choice, CodePart, marked, named
from bexp.explorer.dimensions.execution import EXECUTION
from bexp.explorer.dimensions.place import Place
from bexp.explorer.model.base import Frozen, RuleError
from bexp.explorer.model.target import TRANSFORMERS

if TYPE_CHECKING:
    from bexp.explorer.dimensions.candidate import Candidate


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


BESIDE_EXPERTS = "liger beside experts"
"""What liger's kernels ask of a trainer where experts keep kernels of their own, which liger's patches replace."""


def _explored(place: Place) -> Sequence[Kernels]:
    able = place.expressible.get("kernels", (BESIDE_EXPERTS,))
    is_beside = place.names_experts and BESIDE_EXPERTS not in able
    return (Kernels.LIBRARY,) if place.is_quick or place.target != TRANSFORMERS or is_beside else tuple(Kernels)


class KernelsChoice(Choice[Kernels]):
    """The kernels, the model's own first."""

    def asked_of_trainer(self, candidate: Candidate, place: Place) -> Hashable:
        """Return the kernels of a candidate, and whether they are liger's beside experts."""
        is_beside = candidate.kernels is Kernels.LIGER and candidate.expert_backend is not None
        return BESIDE_EXPERTS if is_beside else candidate.kernels

    def named_for_trainer(self, place: Place) -> Iterable[tuple[str, Any]]:
        """Yield the named kernels, liger's as those beside experts where the model has some."""
        for field, kernels in super().named_for_trainer(place):
            is_beside = kernels is Kernels.LIGER and place.names_experts
            yield field, BESIDE_EXPERTS if is_beside else kernels

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
