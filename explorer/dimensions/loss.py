"""The way in which a model's own code computes its loss: whether the logits of all tokens lie in memory at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import Field

from bexp.explorer.dimensions.dimension import Change, Choice, CodePart, marked, named
from bexp.explorer.dimensions.place import Place, ReportedPlace
from bexp.explorer.model.base import Frozen
from bexp.explorer.model.parts import ModelParts

if TYPE_CHECKING:
    from bexp.explorer.dimensions.candidate import Candidate

Loss = Literal["library", "chunked", "liger", "torch"]


@dataclass(frozen=True, slots=True)
class LossFunction:
    """One way to compute the loss."""

    holds_logits: bool = False
    """Whether the logits of all tokens lie in memory at once."""
    is_tried: bool = False
    """Whether it is tried on the model before the search: a package may be missing, or not know the model."""
    is_explored: bool = True
    """Whether it is explored where no loss is named."""
    waits: bool = False
    """Whether the host waits for the device in it, so that no CUDA graph can hold it."""
    reads: Callable[[float, ModelParts], int] = lambda tokens, parts: 1
    """How often a pass over so many tokens reads the weights of the head."""


def _liger_chunks(tokens: float, parts: ModelParts) -> int:
    """Return in how many chunks liger-kernel computes the loss; each reads all weights of the head.

    A chunk's logits are as large as the inputs of all tokens. Its number of tokens is rounded up to a power of two (Hsu
    et al., 2024, "Liger Kernel", arXiv 2410.10989). With few tokens, reading the weights takes most of the time.
    """
    hidden = parts.output_bytes_per_token / parts.dtype.itemsize
    fewest = math.ceil(parts.head_parameters / hidden**2)
    chunk = 1 << (math.ceil(tokens / fewest) - 1).bit_length()
    return math.ceil(tokens / chunk)


LOSSES: Mapping[Loss, LossFunction] = {
    "library": LossFunction(holds_logits=True),
    "chunked": LossFunction(),
    "liger": LossFunction(is_tried=True, waits=True, reads=_liger_chunks),
    "torch": LossFunction(is_tried=True, is_explored=False),
}
if tuple(LOSSES) != get_args(Loss):
    raise TypeError(f"Loss has {get_args(Loss)}, and LOSSES has {tuple(LOSSES)}: both list the same, in one order")


class LossOf(Frozen):
    """The loss of a candidate."""

    loss: Loss | None = Field(None, description="Null: the request's training.loss.")


class LossAsked(Frozen):
    """The field of a request about the loss."""

    losses: Annotated[tuple[Loss, ...], Field(min_length=1, max_length=len(LOSSES))] | None = Field(
        None,
        description="How a model's own code computes its loss: as its library does, or without full logits, by our "
        "function, liger-kernel's or torch's (2.13). Null: all that a GPU can have but `torch`.",
    )


def _explored(place: Place) -> Sequence[Loss]:
    return ("library",) if place.is_quick else tuple(name for name, loss in LOSSES.items() if loss.is_explored)


class LossChoice(Choice[Loss]):
    """The losses, the library's own first."""

    def asked_of_trainer(self, candidate: Candidate, place: Place) -> Loss:
        """Return the way in which the loss of a candidate was computed."""
        if candidate.loss is None and place.shapes is not None and place.training.loss.kind == "chunked":
            return "chunked"
        return candidate.loss or self.plain

    def named_for_trainer(self, place: Place) -> Iterable[tuple[str, Any]]:
        """Yield the named losses, and the loss of the reference layers."""
        yield from super().named_for_trainer(place)
        if place.shapes is not None and place.training.loss.kind == "chunked":
            yield "training.loss", "chunked"

    def relaxations(self, place: ReportedPlace) -> Iterable[Change]:
        """Yield the chunked loss if all logits lie in memory at once."""
        if place.shapes is not None:
            if place.training.loss.kind == "full":
                loss = place.training.loss.model_copy(update={"kind": "chunked"})
                yield Change("the chunked loss", {"training": place.training.model_copy(update={"loss": loss})})
        elif place.model.computes_losses:
            left = [point[self.fields[0]] for point in self.column(place)({})]
            if all(LOSSES[loss or self.plain].holds_logits for loss in left):
                yield Change("the chunked loss", {"losses": ("chunked",)})


LOSS = LossChoice(
    name="loss",
    fields=("loss",),
    asked="losses",
    values=tuple(LOSSES),
    plain="library",
    explored=_explored,
    words=lambda loss: f"the {loss} loss",
    part=CodePart.SHELL,
    settings=lambda loss: {"loss": loss},
    is_tried=lambda loss: LOSSES[loss].is_tried,
    is_written=True,
    decides_support=True,
    **marked({loss: loss for loss in LOSSES}),
    **named("loss", "loss"),
)


def function_of(setting: str | None) -> LossFunction:
    """Return the way to compute the loss that a shell was measured with; the library's own for any other setting."""
    names = (setting or LOSS.plain).split("+")
    return next((known for name, known in LOSSES.items() if name in names), LOSSES[LOSS.plain])
