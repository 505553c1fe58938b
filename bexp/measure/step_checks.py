"""Checks of a training step that somebody else wrote: it makes gradients, and its batch has the size asked for.

A step that breaks these rules runs without an error, fast, and would win.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class StepError(Exception):
    """A step that ran, but cannot be measured as a training step; the message says why."""


def is_finite(loss: Any) -> bool:
    """Return whether a loss is finite; only tensors and numbers are looked at."""
    if isinstance(loss, Tensor):
        return bool(torch.isfinite(loss.detach()).all())
    return not isinstance(loss, Real) or math.isfinite(loss)


def shapes_of(batch: Any) -> list[torch.Size]:
    """Return the shapes of all tensors in a batch, in the order of its structure."""
    return [leaf.shape for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


class BatchShapes:
    """The shapes of the batches so far, by their number of sequences."""

    def __init__(self) -> None:
        self._shapes: dict[int, list[torch.Size]] = {}

    def check(self, micro_batch_size: int, batch: Any, *, lengths_vary: bool = False) -> None:
        """Check a batch against the earlier ones. A batch without tensors is not checked.

        If `lengths_vary`, batches of two sizes may have equal shapes, because texts may be packed into one row.

        Raises:
            StepError: the batch has the shapes of a batch of another size. Or the first dimension of a tensor was the
                size before, and now no dimension is the new size.
        """
        shapes = shapes_of(batch)
        for size, earlier in self._shapes.items():
            if size == micro_batch_size or not shapes:
                continue
            if shapes == earlier and not lengths_vary:
                raise StepError(
                    f"batch({micro_batch_size}) has the shapes of batch({size}): it must return {micro_batch_size} "
                    "sequences"
                )
            if wrong_size := _wrong_size(micro_batch_size, shapes, size, earlier):
                raise StepError(
                    f"batch({micro_batch_size}) returns {wrong_size} sequences: it must return {micro_batch_size}"
                )
        self._shapes.setdefault(micro_batch_size, shapes)


def _wrong_size(size: int, shapes: list[torch.Size], other: int, earlier: list[torch.Size]) -> int | None:
    """Return the number of sequences of a batch in which no tensor has `size` of them; None if nothing is wrong.

    A first dimension of one is not a number of sequences, because texts may be packed into one row. Sequences may also
    lie along another dimension, and the first one may be their length, which happens to be a size.
    """
    if len(shapes) != len(earlier) or any(size in shape for shape in shapes):
        return None
    counted = [now[0] for now, before in zip(shapes, earlier, strict=True) if now and before[:1] == (other,)]
    return next((number for number in counted if number != 1), None)


def check_gradients(parameters: Iterable[nn.Parameter], run_again: Callable[[], object]) -> None:
    """Check after a step that it has made gradients.

    Some libraries keep gradients elsewhere than in `grad`. If no parameter has one, the step runs once more, and
    hooks say whether a backward pass reaches any parameter.

    Raises:
        StepError: the step has no backward pass.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained or any(parameter.grad is not None for parameter in trained):
        return
    reached: list[bool] = []
    handles = [parameter.register_hook(lambda _: reached.append(True)) for parameter in trained]
    try:
        run_again()
    finally:
        for handle in handles:
            handle.remove()
    if not reached:
        raise StepError("the step leaves no gradients: it must run the backward pass, as by loss.backward()")
