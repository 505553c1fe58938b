"""Computing activations again in backward instead of keeping them (Chen et al., 2016, arXiv:1604.06174)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Tensor], *inputs: Tensor, early_stop: bool = True) -> Tensor:
    """`function(*inputs)`, keeping only the inputs; without gradients it is a plain call.

    The recomputation stops at the last tensor that backward needs. If `early_stop` is false it runs to its end, as all
    but the last block of a layer do if the layer is recomputed as a whole.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    if torch.compiler.is_compiling():  # the operator inside a graph has no early stop
        in_graph: Tensor = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
        return in_graph
    out: Tensor = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False, early_stop=early_stop)
    return out
