"""The kernel that computes attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from bexp.explorer.dimensions.dimension import Change, Column, Dimension, Term, unless_null
from bexp.explorer.dimensions.place import EmptySpaceError, Place, ReportedPlace, check_names, usable_backends
from bexp.explorer.model.base import Frozen, RuleError
from bexp.explorer.model.hardware import DeviceSupport
from bexp.explorer.model.target import BEXP, OWN_ATTENTION, TRANSFORMERS

if TYPE_CHECKING:
    from bexp.explorer.dimensions.candidate import Candidate

TORCH_CHOICE = "sdpa"
"""torch's scaled_dot_product_attention, which chooses its kernel by itself."""
TORCH_KERNELS = frozenset({"flash", "cudnn", "efficient", "math"})
"""The kernels of torch's scaled_dot_product_attention that can be pinned."""
LIBRARY_ATTENTION = frozenset(
    {TORCH_CHOICE, "eager", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4"}
)
"""Attention implementations of the transformers library."""
ATTENTION_OF: Mapping[str, frozenset[str]] = {
    BEXP: TORCH_KERNELS,
    TRANSFORMERS: LIBRARY_ATTENTION | {f"{TORCH_CHOICE}:{kernel}" for kernel in TORCH_KERNELS},
}
"""The kernels of a target. A person's own target has no names for the kernels that it calls."""
BackendName = Annotated[str, Field(min_length=1, max_length=64)]


def is_flash(attention_backend: str) -> bool:
    """Return whether a back end is FlashAttention by its name: `flash`, `sdpa:flash`, `flash_attention_2`."""
    return attention_backend in {"flash", "sdpa:flash"} or attention_backend.startswith("flash_attention")


class AttentionOf(Frozen):
    """The attention kernel of a candidate."""

    attention_backend: str


class AttentionAsked(Frozen):
    """The fields of a request about attention kernels."""

    attention_backends: Annotated[tuple[BackendName, ...], Field(min_length=1, max_length=16)] | None = Field(
        None, description="The attention kernels to choose among. Null: all that the device can use."
    )
    flash_attention: bool = Field(True, description="False excludes every back end that is FlashAttention.")


class Attention(Dimension):
    """The kernels that a device can use. Of these, some let devices share sequences, for context parallelism."""

    def asked_of_trainer(self, candidate: Candidate, place: Place) -> str | None:
        """Return the attention implementation, by the names of the transformers library."""
        return attention_name(candidate, place.report)

    def named_for_trainer(self, place: Place) -> Iterable[tuple[str, Any]]:
        """Yield the kernels that a request names.

        Those of torch are left out, because each may be the device's default.
        """
        named = place.asked.attention_backends or ()
        return (("attention_backends", name) for name in named if name not in TORCH_KERNELS)

    def check(self, place: Place) -> None:
        """Check that the target knows the named kernels, and that `flash_attention` does not exclude all of them."""
        named = place.asked.attention_backends or ()
        check_names("attention", named, ATTENTION_OF.get(place.target, {OWN_ATTENTION}), place)
        if named and all(map(is_flash, named)) and not place.asked.flash_attention:
            raise RuleError(
                "attention_backends allows only flash, and flash_attention is false",
                "attention_backends",
                "flash_attention",
            )

    def relaxations(self, place: ReportedPlace) -> Iterable[Change]:
        """Yield the kernels that the request excludes."""
        if place.asked.attention_backends is not None:
            yield Change("every attention back end", {"attention_backends": None})
        if not place.asked.flash_attention:
            yield Change("flash attention", {"flash_attention": True})

    def column(self, place: ReportedPlace) -> Column:
        """Return the kernels that can serve each number of devices a sequence."""
        return _serving(usable_attention(place.asked, place.report, place.model.place), place)

    def bases(self, place: ReportedPlace) -> Column:
        """Return torch's default kernel, or the first that suits the candidate if the default does not.

        The default does not suit if devices share sequences and it cannot serve them. Nor does it if it is flash
        attention, and the request excludes that.
        """
        usable = [backend.name for backend in place.report.attention_backends if backend.usable]
        names = [place.report.default_attention, *usable]
        if not place.asked.flash_attention:
            names = [name for name in names if name in usable and not is_flash(name)]
        column = _serving(names, place)
        return lambda known: list(column(known))[:1]


def _serving(names: Sequence[str], place: ReportedPlace) -> Column:
    """Return a column of the kernels that serve the numbers of devices a sequence that are known."""
    shared = serving(names, place.report)
    every, some = (tuple({"attention_backend": name} for name in each) for each in (names, shared))
    return lambda known: every if known["context_parallel_size"] == 1 else some


def serving(names: Sequence[str], report: DeviceSupport) -> tuple[str, ...]:
    """Return those kernels that serve sequences which several devices share."""
    known = {backend.name for backend in report.attention_backends if backend.usable and backend.context_parallel}
    return tuple(name for name in names if name in known)


def attention_name(candidate: Candidate, report: DeviceSupport | None) -> str | None:
    """Return the attention implementation by the transformers library's names; None for whatever the code calls.

    A kernel of torch's is `sdpa` if torch chooses it by itself on the device, else `flash`, `cudnn`, `efficient` or
    `math`: it was pinned.
    """
    name = candidate.attention_backend
    if candidate.is_whole:
        return None
    if report is not None and name == report.default_attention and name in TORCH_KERNELS:
        return TORCH_CHOICE
    return name.removeprefix(f"{TORCH_CHOICE}:")


def usable_attention(asked: AttentionAsked, report: DeviceSupport, where: str) -> list[str]:
    """Return the attention back ends that the request admits and the device can use.

    Raises:
        EmptySpaceError: none is left.
    """
    names = usable_backends("attention back end", report.attention_backends, asked.attention_backends, where)
    left = [name for name in names if asked.flash_attention or not is_flash(name)]
    if not left:
        raise EmptySpaceError("no attention back end is left on this device once flash is excluded")
    return left


ATTENTION = Attention(
    name="attention",
    fields=("attention_backend",),
    asked="attention_backends",
    term=Term(
        lambda name, lacking: f"the attention kernel '{name}'",
        lambda name: unless_null(name and name.removeprefix(f"{TORCH_CHOICE}:")),
        frozenset({TORCH_CHOICE}),
    ),
    needs=("context_parallel",),
    label=lambda candidate: None if candidate.is_whole else f"attention={candidate.attention_backend}",
    row=lambda candidate: None if candidate.is_whole else ("attention", candidate.attention_backend),
)
