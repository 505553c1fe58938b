"""Recomputes activations in backward instead of keeping them (Chen et al., 2016, arXiv:1604.06174)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Tensor], *inputs: Tensor, early_stop: bool = True) -> Tensor:
    """Return `function(*inputs)` and keep only the inputs for backward. Without gradients this is a plain call.

    The recomputation stops at the last tensor that backward needs. If `early_stop` is false, it runs to the end, as
    every block but the last one does in a layer that is recomputed as a whole.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    if torch.compiler.is_compiling():  # the operator inside a graph has no early stop
        in_graph: Tensor = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
        return in_graph
    out: Tensor = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False, early_stop=early_stop)
    return out


def recomputed_group(layers: Iterable[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    """Return the result of layers that run one after another, and keep only `x` for backward.

    In backward all of them run again, to the end, as in Megatron's uniform method. Their activations are in memory
    together then.
    """

    def run(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x

    return recomputed(run, x, early_stop=False)
