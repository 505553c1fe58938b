"""The training micro-step of a transformers model, replayed as CUDA graphs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bexp.graphs.graphed_loss import GraphedLoss
from bexp.transformers.undo import Changes

_MASK, _POSITIONS, _NUMBER = "attention_mask", "position_ids", "num_items_in_batch"


def set_graph(model: nn.Module, changes: Changes) -> None:
    """Replay the model's micro-steps as CUDA graphs, from the first training forward with labels on."""
    changes.set(model, "forward", GraphedForward(model, model.forward))


def graphed(model: nn.Module) -> GraphedForward | None:
    """Return the forward that replays a model's micro-steps; None if it has none."""
    forward = vars(model).get("forward")
    while not isinstance(forward, GraphedForward | None):  # others wrap a forward, as accelerate does
        forward = getattr(forward, "__wrapped__", None)
    return forward


class GraphedForward:
    """The `forward` of a model with a loss. Where graphs are replayed, its output has the loss and nothing else.

    A mask of ones is left out, because attention without a mask has the faster kernels. To see that, the device is read
    once a micro-step, as transformers does, too. A loader that makes no masks saves the reading.
    """

    def __init__(self, model: nn.Module, plain: Callable[..., Any]) -> None:
        self.__signature__ = inspect.signature(plain)
        self._model = model
        self._plain = plain
        self._output_type: type[Any] | None = None
        self.loss = GraphedLoss(model, self._loss_of, within=_plain_masks)

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a copy make graphs of its own."""
        return type(self), (self._model, self._plain)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output."""
        if args or not self._is_micro_step(kwargs):
            return self._plain(*args, **kwargs)
        inputs = {name: value for name, value in kwargs.items() if value is not None}
        mask = inputs.get(_MASK)
        if isinstance(mask, Tensor) and mask.dim() == 2 and bool(mask.all()):
            del inputs[_MASK]
        if isinstance(number := inputs.get(_NUMBER), int):
            inputs[_NUMBER] = torch.full((), number, device=inputs["labels"].device)
        loss = self.loss(**inputs)
        assert self._output_type is not None, "the model ran"
        return self._output_type(loss=loss)

    def _is_micro_step(self, kwargs: dict[str, Any]) -> bool:
        """Return whether a call can be replayed: it trains, and its loss is all that is asked for."""
        if self.loss.problem is not None or not (torch.is_grad_enabled() and self._model.training):
            return False
        return (
            isinstance(kwargs.get("labels"), Tensor)
            and not torch.compiler.is_compiling()
            and (kwargs.get("return_dict") is not False)
        )

    def _loss_of(self, **inputs: Any) -> Tensor:
        output = self._plain(**inputs)
        self._output_type = type(output)
        loss: Tensor = output.loss
        return loss


@contextmanager
def _plain_masks(inputs: dict[str, Any]) -> Iterator[None]:
    """Keep attention without a mask so in a capture.

    transformers reads from the device whether positions are those of packed texts, and whether a mask can be left out.
    In a capture it cannot read, and makes a mask. Without a mask and positions in the inputs, both answers are known.
    """
    from transformers import masking_utils  # noqa: PLC0415 - optional

    if _MASK in inputs or _POSITIONS in inputs:
        yield
        return
    answers: dict[str, Callable[..., Any]] = {
        "find_packed_sequence_indices": lambda *_, **__: None,
        "is_tracing": lambda *_, **__: False,
    }
    kept = {name: getattr(masking_utils, name) for name in answers if hasattr(masking_utils, name)}
    for name in kept:
        setattr(masking_utils, name, answers[name])
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(masking_utils, name, function)
