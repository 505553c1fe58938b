"""Parameters, created and drawn on their device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bexp.explorer.model.model import ModelSpec
from bexp.explorer.model.routes import draw_batch_routes
from bexp.explorer.model.routing import RoutingSpec
from bexp.workers.instruments.kernel_shapes import torch_dtype

_STANDARD_DEVIATION = 0.02  # as in GPT-2 and its successors


@dataclass(frozen=True)
class Weights:
    """The maker of a block's parameters, with their format, their device, and whether they are trained."""

    dtype: torch.dtype
    device: torch.device
    trained: bool
    generator: torch.Generator | None = None

    @classmethod
    def of(
        cls, model: ModelSpec, device: torch.device, training: bool, generator: torch.Generator | None = None
    ) -> Weights:
        """Return a maker of parameters in the model's dtype; frozen in eval mode, so that no forward keeps a graph."""
        return cls(torch_dtype(model.dtype), device, training, generator)

    def normal(self, *shape: int) -> nn.Parameter:
        """Return a normally distributed parameter, drawn without a copy on the host."""
        weight = torch.empty(shape, dtype=self.dtype, device=self.device)
        weight.normal_(0.0, _STANDARD_DEVIATION, generator=self.generator)
        return nn.Parameter(weight, requires_grad=self.trained)

    def ones(self, *shape: int) -> nn.Parameter:
        """Return a parameter of ones, for the scale of a norm."""
        return nn.Parameter(torch.ones(shape, dtype=self.dtype, device=self.device), requires_grad=self.trained)

    def zeros(self, *shape: int) -> nn.Parameter:
        """Return a parameter of zeros, for the offset of a norm."""
        return nn.Parameter(torch.zeros(shape, dtype=self.dtype, device=self.device), requires_grad=self.trained)


def device_routes(model: ModelSpec, routing: RoutingSpec, num_tokens: int, seed: int, device: torch.device) -> Tensor:
    """Return expert indices (num_tokens, top_k) int64 for `model` on `device`, which repeat for many tokens."""
    assert model.moe is not None, "a model with experts"
    drawn = torch.from_numpy(draw_batch_routes(model.moe, routing, num_tokens, seed)).to(device)
    repeats = -(-num_tokens // drawn.shape[0])
    return drawn.repeat(repeats, 1)[:num_tokens].contiguous()
