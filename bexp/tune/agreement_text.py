"""The answer to whether accumulation changes a training, and its text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

WIDTH = 80
LABEL = 24
LEAST_SHOWN = 1e-5
SAME = 0.02


class Cause(StrEnum):
    """Known reasons why the gradients of a batch depend on its micro-batches."""

    AVERAGED = "averaged by micro-batch"
    SCALED = "wrong number of micro-batches"
    DEVICE = "counted by device"
    ROUTER = "router loss"
    BATCH_NORM = "batch norm"
    TOGETHER = "samples depend on each other"


_SENTENCES = {
    Cause.AVERAGED: "the loss is averaged in each micro-batch, where label tokens are few or many, and not over the "
    "whole batch",
    Cause.DEVICE: "label tokens are counted on each device, and not over all of them",
    Cause.ROUTER: "the loss that balances the routers, without which the gradients agree",
    Cause.BATCH_NORM: "batch norm over each micro-batch, without which the gradients agree",
    Cause.TOGETHER: "the loss of a sample depends on the others in its micro-batch: in-batch negatives, another loss "
    "over the micro-batch, or padding that is not masked",
}


@dataclass(frozen=True)
class Finding:
    """A cause that fits."""

    cause: Cause
    ratio: float = 1.0
    """How many times too large the cause makes the accumulated gradient."""
    weights: tuple[float, float] | None = None
    """The least and the largest share that micro-batches should have, as multiples of the mean."""

    def describe(self, steps: float) -> str:
        """Return a sentence; `steps` is how many times more micro-batches there are."""
        if self.cause is Cause.SCALED:
            return _scale(self.ratio, steps)
        text = _SENTENCES[self.cause]
        if self.weights is not None:
            text += f": each should count {self.weights[0]:.2f} to {self.weights[1]:.2f} times as much"
        return text if abs(self.ratio - 1) < SAME else f"{text}; also, {_scale(self.ratio, steps)}"


@dataclass(frozen=True)
class AccumulationCheck:
    """The answer whether the gradients of one batch are the same in large and in small micro-batches."""

    agrees: bool
    """Whether they are the same, within the tolerance."""
    batch_size: int
    """The samples that were compared, on each device."""
    large_micro_batch_size: int
    """The micro-batch to compare with: all samples, if they fit the memory."""
    micro_batch_size: int
    """The micro-batch that was accumulated."""
    norm: float
    """The gradient's norm in large micro-batches."""
    accumulated_norm: float
    """The gradient's norm in small micro-batches; for `Cause.DEVICE`, with the samples on other devices."""
    cosine: float
    """The cosine of the angle between both."""
    difference: float
    """The norm of their difference, as a share of `norm`."""
    spread: float
    """The difference of two orders of the same samples, in the same micro-batches."""
    tolerance: float
    """The most that `difference` may be."""
    cause: Cause | None
    """The known cause that fits, if they differ."""
    reason: str | None
    """This cause in a sentence, with its size."""
    text: str
    """The verdict in a few lines."""

    @classmethod
    def of(
        cls,
        *,
        agrees: bool,
        shape: tuple[int, int, int],
        norms: tuple[float, float],
        cosine: float,
        difference: float,
        spread: float,
        tolerance: float,
        kind: tuple[str, float] | None,
        finding: Finding | None,
        note: str | None,
    ) -> AccumulationCheck:
        """Return the answer with its text. `kind` names the weights that differ most, beyond their own spread."""
        number, large, small = shape
        is_devices = finding is not None and finding.cause is Cause.DEVICE
        rows = [
            (_shape(number, large), f"norm {norms[0]:.6g}"),
            ("on other devices" if is_devices else _shape(number, small), f"norm {norms[1]:.6g}"),
            ("difference", _difference(difference, cosine, spread, tolerance)),
        ]
        if difference <= tolerance and kind is not None:
            rows.append(("", f"but {kind[0]} differs by {_share(kind[1])}, more than its own spread allows"))
        reason = None if finding is None else finding.describe(large / small)
        if reason is not None:
            rows.append(("probable cause", reason))
        if note is not None:
            rows.append(("not checked", note))
        changes = "another number of devices" if is_devices else "another micro-batch"
        verdict = "The gradients agree: accumulation leaves this training as it is."
        if not agrees:
            verdict = f"The gradients do not agree: {changes} changes this training."
        text = "\n".join([verdict, *(line for row in rows for line in _lines(*row))])
        cause = None if finding is None else finding.cause
        return cls(agrees, number, large, small, *norms, cosine, difference, spread, tolerance, cause, reason, text)


def in_short(check: Mapping[str, Any], kept_size: int | None) -> str:
    """Return the verdict of an `AccumulationCheck`, given as a document, in a sentence or two for an answer's notes.

    `kept_size` is the micro-batch that has to stay because its samples depend on each other, if it has to.
    """
    of = f"the gradients of {check['batch_size']} samples"
    sizes = f"micro-batches of {check['large_micro_batch_size']} and of {check['micro_batch_size']}"
    if check["agrees"]:
        return f"{of} are the same in {sizes}, so the size changes no training"
    why = check["reason"] or "no known cause fits"
    text = f"{of} differ by {_share(check['difference'])} between {sizes}: {why}"
    if kept_size is None:
        return f"{text}. Another size changes this training; `bexp check-accumulation` says more"
    return (
        f"{text}. So the micro-batch stays {kept_size}. Losses with a cache, such as sentence-transformers' Cached "
        "ones, have a mini-batch size that changes memory and speed alone"
    )


def _scale(ratio: float, steps: float) -> str:
    if abs(ratio / steps - 1) < SAME:
        return f"the loss is not divided by the number of micro-batches: the sum is {ratio:.3g} times too large"
    if abs(ratio * steps - 1) < SAME:
        return f"the loss is divided twice by the number of micro-batches: the sum is {1 / ratio:.3g} times too small"
    return f"the loss is divided by a wrong number of micro-batches: the sum is {ratio:.3g} times what it should be"


def _shape(number: int, size: int) -> str:
    count = number // size
    return f"{count} micro-batch{'' if count == 1 else 'es'} of {size}"


def _difference(difference: float, cosine: float, spread: float, tolerance: float) -> str:
    return (
        f"{_share(difference)}, cosine {cosine:.6f}; {_share(tolerance)} is allowed: two orders of the same samples "
        f"differ by {_share(spread)}"
    )


def _share(share: float) -> str:
    if share < LEAST_SHOWN:
        return f"under {LEAST_SHOWN:.3%}"
    return f"{100 * share:.2g}%" if share < 0.1 else f"{share:.0%}"


def _lines(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"  {label:<{LABEL}}",
        subsequent_indent=" " * (LABEL + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )
