"""What an expert back end is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, get_args

import torch
from torch import Tensor

from bexp.kernels.activations import Activation
from bexp.kernels.shapes import ExpertsShape


class ExpertFFN(Protocol):
    """Sends each token through its experts and sums what they return.

    It takes x (T, D), routes (T, K) int64 with K distinct experts per token, weights (T, K) in x's dtype, w_in (E, D,
    H), or (E, D, 2H) with the gate in front of the up projection, and w_out (E, H, D). It returns (T, D). It is
    differentiable in everything but the routes. The gradient of x is a new tensor, which the caller may add to in
    place.
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

    `stock` marks back ends that torch itself has. `check` returns why the back end cannot serve a shape on a device, or
    None. torch.compile can trace through the back end in `traceable_dtypes`, because it never waits for the device
    there. In other dtypes it stays eager inside a compiled block.
    """

    name: str
    stock: bool
    check: Callable[[ExpertsShape, torch.device], str | None]
    forward: ExpertFFN
    traceable_dtypes: frozenset[torch.dtype] = frozenset()

    def unsupported_reason(self, shape: ExpertsShape, device: torch.device) -> str | None:
        """Return why the back end cannot serve `shape` on `device`; None if it can."""
        known = get_args(Activation)
        if shape.activation not in known:
            return f"{self.name} knows the activations {', '.join(known)}, not {shape.activation}"
        return self.check(shape, device)
