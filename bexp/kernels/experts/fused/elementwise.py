"""Activations and their derivatives in float32, for the epilogues of the GEMMs."""

from __future__ import annotations

import triton.language as tl

from bexp.kernels.jit import jit


@jit
def activation(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """`act(x)`; gelu is the exact one (Hendrycks and Gimpel, 2016)."""
    if ACTIVATION == "silu":
        y = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        y = tl.maximum(x, 0.0)
    return y


@jit
def activation_slope(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """`act'(x)`."""
    if ACTIVATION == "silu":
        s = tl.sigmoid(x)
        y = s * (1.0 + x * (1.0 - s))
    elif ACTIVATION == "gelu":
        y = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    else:
        y = tl.where(x > 0.0, 1.0, 0.0)
    return y
