"""A target of your own: any training step, measured as a whole.

    class Target:
        def build(self, config, device): ...            # an nn.Module on the device, as you train it
        def batch(self, micro_batch_size, device): ...  # a micro-batch of so many sequences
        def step(self, model, batch): ...               # forward and backward; returns the loss

Name it for one exploration with `bexp explore CONFIG --target train.py:Target`, or register it on a worker under the
entry-point group `bexp.targets`. Each exploration measures it in a process of its own, which imports `bexp`, the
target's folder, and nothing of the service.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:  # whoever asks which targets are installed needs no torch
    import torch
    from torch import Tensor, nn


@runtime_checkable
class Target(Protocol):
    """The members that a target must have; `OptionalMembers` has more. A class is called without arguments first."""

    def build(self, config: Mapping[str, Any], device: torch.device) -> nn.Module:
        """Return the model with its weights on the device, in the number formats that it is trained in.

        `config` is the request's `target_config`, or its model. Values of `dimensions` are entered in it.
        """

    def batch(self, micro_batch_size: int, device: torch.device) -> Any:
        """Return a micro-batch of that many sequences on the device."""

    def step(self, model: nn.Module, batch: Any) -> Tensor | float | None:
        """Run forward and backward, and return the loss. Gradients are accumulated; the optimizer is not stepped."""


class OptionalMembers(Protocol):
    """The members that a target may have."""

    seq_length: int
    """Tokens of a sequence; `build` may set it. Without it, rates count sequences in place of tokens."""

    dimensions: Mapping[str, Sequence[Any]]
    """Explored in addition to the micro-batch size: values by name. Each choice enters the `config` of `build`."""

    def worst_batch(self, micro_batch_size: int, device: torch.device) -> Any:
        """Return the micro-batch that needs the most memory, if lengths vary. The peak is measured with it."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer. Without this method it is the request's: fused AdamW, or SGD with momentum."""
