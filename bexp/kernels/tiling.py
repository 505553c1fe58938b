"""BTA (batch tiling on attention): a block runs tile by tile over the batch, and each tile runs again in backward.

Attention mixes the tokens of a sequence but never two sequences. Tiling the batch therefore changes neither the output
nor the gradients, while the activations of the block exist for one tile at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bexp.kernels.recomputation import recomputed


def tiled(
    function: Callable[[Tensor], Tensor], x_BSD: Tensor, tile: int | None, *, keep_inputs_only: bool = True
) -> Tensor:
    """`function(x)` in tiles of `tile` sequences, which divides the batch; null runs the batch whole.

    If `keep_inputs_only`, all that is kept of a tile for backward is its input, a view of x; a tile as large as the
    batch is one recomputed block. If not, nothing will be differentiated, and the tiles run forward only.
    """
    if tile is None:
        return function(x_BSD)
    assert x_BSD.shape[0] % tile == 0, "the tile divides the micro-batch"
    run = (lambda x_tile: recomputed(function, x_tile)) if keep_inputs_only else function
    if tile == x_BSD.shape[0]:
        return run(x_BSD)
    return torch.cat([run(x_tile) for x_tile in x_BSD.split(tile)])
