"""The kernel that computes the experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from bexp.explorer.dimensions.attention import BackendName
from bexp.explorer.dimensions.dimension import Column, Dimension, Term, column_of, named, unless_null
from bexp.explorer.dimensions.place import EmptySpaceError, Place, ReportedPlace, check_names, usable_backends
from bexp.explorer.model.base import Frozen, RuleError
from bexp.explorer.model.expert_kernels import EXPERT_KERNELS, NAMED_LIBRARY_EXPERTS
from bexp.explorer.model.target import BEXP, TRANSFORMERS

if TYPE_CHECKING:
    from bexp.explorer.dimensions.candidate import Candidate


LIBRARY_EXPERTS = frozenset({kernel.library for kernel in EXPERT_KERNELS if kernel.library}) | {*NAMED_LIBRARY_EXPERTS}
"""Experts implementations of the transformers library."""
OUR_EXPERTS = tuple(kernel.name for kernel in EXPERT_KERNELS if kernel.library is None)
"""Back ends that are not the transformers library's own."""
DEFAULT_EXPERTS = frozenset({"grouped_mm", "loop"})
"""Expert back ends, one of which is the default of a device."""
EXPERTS_OF: Mapping[str, frozenset[str]] = {
    BEXP: frozenset(kernel.name for kernel in EXPERT_KERNELS),
    TRANSFORMERS: LIBRARY_EXPERTS | {kernel.in_library for kernel in EXPERT_KERNELS},
}
"""The kernels of a target. A person's own target has no names for the kernels that it calls."""
RECORDED_EXPERTS = frozenset({"triton_grouped"})
"""Kernels of recorded tables that this version does not have; a worker without such a table refuses them."""
WAITING_EXPERTS = frozenset(
    {name for kernel in EXPERT_KERNELS if kernel.waits for name in (kernel.name, kernel.in_library)}
)
"""Expert back ends, by all their names, that wait for the device to count each expert's tokens."""
_LIBRARY_NAMES = {kernel.name: kernel.library for kernel in EXPERT_KERNELS if kernel.library}


def library_experts(name: str) -> str:
    """Return the transformers library's name of an expert back end; ours keep their own."""
    return _LIBRARY_NAMES.get(name, name)


class ExpertsOf(Frozen):
    """The expert kernel of a candidate."""

    expert_backend: str | None = Field(None, description="Null for a model without experts.")


class ExpertsAsked(Frozen):
    """The field of a request about expert kernels."""

    expert_backends: Annotated[tuple[BackendName, ...], Field(min_length=1, max_length=16)] | None = Field(
        None,
        description="The expert kernels to choose among. Null: all that the device can use but those that must be "
        "named, such as `batched_mm` on a GPU.",
    )


def experts_name(candidate: Candidate) -> str | None:
    """Return the experts implementation by the transformers library's names; ours keep their own."""
    name = candidate.expert_backend
    return None if name is None else library_experts(name)


class Experts(Dimension):
    """The kernels of a model with experts that a device can use."""

    def asked_of_trainer(self, candidate: Candidate, place: Place) -> str | None:
        """Return the implementation by the transformers library's names; None for the default of the device."""
        is_default = place.report is not None and candidate.expert_backend == place.report.default_experts
        return None if is_default else experts_name(candidate)

    def named_for_trainer(self, place: Place) -> Iterable[tuple[str, Any]]:
        """Yield the kernels that a request names, except those that may be the device's default."""
        named = place.asked.expert_backends or ()
        return (("expert_backends", name) for name in named if name not in DEFAULT_EXPERTS)

    def check(self, place: Place) -> None:
        """Check that the target knows the named kernels, and that the model has experts."""
        named = place.asked.expert_backends
        if named is not None and place.shapes is not None and not place.shapes.has_experts:
            raise RuleError("expert_backends given for a model without experts", "expert_backends")
        present = [name for name in named or () if name not in RECORDED_EXPERTS]
        check_names("expert", present, EXPERTS_OF.get(place.target, frozenset()), place)

    def column(self, place: ReportedPlace) -> Column:
        """Return the kernels that the request admits."""
        named, where = place.asked.expert_backends, place.model.place
        if place.model.has_experts:
            names = usable_backends("expert back end", place.report.expert_backends, named, where)
            return column_of("expert_backend", names)
        if named is not None:
            raise EmptySpaceError(f"expert_backends are given, and there are no experts {where}")
        return column_of("expert_backend", (None,))

    def bases(self, place: ReportedPlace) -> Column:
        """Return the device's default."""
        return column_of("expert_backend", (place.report.default_experts if place.model.has_experts else None,))


EXPERTS = Experts(
    name="experts",
    fields=("expert_backend",),
    asked="expert_backends",
    term=Term(
        lambda name, lacking: f"the expert kernels '{name}'",
        lambda name: unless_null(name and library_experts(name)),
        frozenset({"grouped_mm"}),
    ),
    **named("experts", "expert_backend"),
)
