"""What the kernels should compute, written as plainly as possible in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "relu": lambda x: x.clamp(min=0),
}


def leaves(tensors: Sequence[Tensor], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Copies in `dtype` that ask for their gradients."""
    return [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]


def relative_error(actual: Tensor | None, expected: Tensor | None) -> float:
    """Norm of the difference over the norm of what was expected; infinite for NaN, which `max` may pass over."""
    assert actual is not None
    assert expected is not None
    assert actual.shape == expected.shape
    difference = (actual.detach().double().cpu() - expected.detach().double().cpu()).norm()
    error = float(difference / expected.detach().double().cpu().norm().clamp(min=1e-30))
    return math.inf if math.isnan(error) else error


SUMMED, ROUNDED = 64, 2
"""How far what is computed again may be off: so many roundings of its sums, and of the results themselves."""


def assert_same_values(actual: Iterable[Tensor | None], expected: Iterable[Tensor | None]) -> None:
    """Assert that tensors hold the same, up to rounding if they are floating-point.

    The order of a sum depends on the shape, on the number of threads, on what the processor can do, and on where
    numbers lie in memory. So only what was moved or chosen is the same bit by bit. Sums have at least float32.
    """
    for mine, wanted in zip(actual, expected, strict=True):
        assert mine is not None
        assert wanted is not None
        assert mine.dtype == wanted.dtype
        eps = torch.finfo(wanted.dtype).eps if wanted.is_floating_point() else 0.0
        tolerance = SUMMED * min(eps, torch.finfo(torch.float32).eps) + ROUNDED * eps
        error = relative_error(mine, wanted)
        assert error <= tolerance, f"{error} of the norm, shape {tuple(wanted.shape)}"


def activation(x: Tensor, name: str, gated: bool) -> Tensor:
    """`act(x)`, or `act(first half) * second half`."""
    if not gated:
        return _ACTIVATIONS[name](x)
    width = x.shape[-1] // 2
    return _ACTIVATIONS[name](x[..., :width]) * x[..., width:]


def experts(x: Tensor, routes: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor, name: str) -> Tensor:
    """Each expert on the tokens of its pairs, one expert after the other."""
    gated = w_in.shape[2] == 2 * w_out.shape[1]
    total = torch.zeros_like(x)
    for e in routes.unique().tolist():
        t, k = (routes == e).nonzero(as_tuple=True)
        out = activation(x[t] @ w_in[e], name, gated) @ w_out[e]
        total = total.index_add(0, t, weights[t, k, None] * out)
    return total


def kept_pairs(routes: Tensor, weights: Tensor, capacity: int) -> Tensor:
    """Whether each expert takes a pair (T, K): the `capacity` pairs of largest weight, the earlier of equal ones."""
    kept = torch.zeros_like(routes, dtype=torch.bool)
    for expert in routes.unique().tolist():
        pairs = (routes == expert).nonzero().tolist()
        for t, k in sorted(pairs, key=lambda pair: -weights[pair[0], pair[1]].item())[:capacity]:
            kept[t, k] = True
    return kept


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention; q (B, H, S, D), k and v (B, G, S, D)."""
    heads, groups, length = q.shape[1], k.shape[1], q.shape[2]
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    outs = []
    for head in range(heads):
        group = head // (heads // groups)
        scores = q[:, head] @ k[:, group].transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(hidden, -math.inf)
        scores = torch.exp(scores - scores.amax(-1, keepdim=True))
        outs.append(scores / scores.sum(-1, keepdim=True) @ v[:, group])
    return torch.stack(outs, dim=1)
