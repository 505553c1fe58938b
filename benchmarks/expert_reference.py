"""A plain expert FFN for large shapes: one expert after the other, in the inputs' dtype."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bexp.kernels.activations import Activation

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}


def expert_ffn(
    x_TD: Tensor, routes_TK: Tensor, weights_TK: Tensor, w_in: Tensor, w_out: Tensor, activation: Activation
) -> Tensor:
    """Do what `ExpertFFN` does. In float64 this is the reference for the back ends."""
    hidden_size = w_out.shape[1]
    out = torch.zeros_like(x_TD)
    for expert in range(w_in.shape[0]):
        tokens, ranks = torch.where(routes_TK == expert)
        h = x_TD[tokens] @ w_in[expert]
        act = _ACTIVATIONS[activation](h[:, :hidden_size])
        if h.shape[1] > hidden_size:
            act = act * h[:, hidden_size:]
        y = act @ w_out[expert]
        out = out.index_add(0, tokens, weights_TK[tokens, ranks].unsqueeze(1) * y)
    return out


def relative_error(actual: Tensor, wanted: Tensor) -> float:
    """Return the norm of the difference over the norm of the expected value; infinity for NaN."""
    difference = (actual.detach().double() - wanted.detach().double()).norm()
    error = float(difference / wanted.detach().double().norm().clamp(min=1e-30))
    return math.inf if math.isnan(error) else error
