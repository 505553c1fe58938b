"""What an expert back end is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bexp.kernels.activations import Activation
from explorer.spec.model import ModelSpec


class ExpertFFN(Protocol):
    """Sends each token through its experts and sums what they return.

    Takes x (T, D), routes (T, K) int64 with K distinct experts a token, weights (T, K) in x's dtype, w_in (E, D, H), or
    (E, D, 2H) with the gate in front of the up projection, w_out (E, H, D). Returns (T, D). Differentiable in all
    but the routes; the gradient of x is a tensor of its own, which the caller may add to in place.
    """

    def __call__(
        self,
        x_TD: Tensor,
        routes_TK: Tensor,
        weights_TK: Tensor,
        w_in: Tensor,
        w_out: Tensor,
        activation: Activation,
    ) -> Tensor:
        """Run it."""


@dataclass(frozen=True)
class ExpertBackend:
    """One implementation of an expert FFN.

    `unsupported_reason` is null where it serves the model on the device. In `traceable_dtypes` torch.compile can take
    it in, since it never waits for the device; in others it stays eager inside a compiled block.
    """

    name: str
    stock: bool
    unsupported_reason: Callable[[ModelSpec, torch.device], str | None]
    forward: ExpertFFN
    traceable_dtypes: frozenset[torch.dtype] = frozenset()
