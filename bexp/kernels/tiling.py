"""BTA (batch tiling on attention): a block runs over the batch tile by tile, and each tile runs again in backward.

Attention mixes the tokens of a sequence but never two sequences. So tiling the batch changes neither the output nor the
gradients, and the activations of the block exist for only one tile at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bexp.kernels.recomputation import recomputed


def tiled(
    function: Callable[[Tensor], Tensor], x_BSD: Tensor, tile: int | None, *, keep_inputs_only: bool = True
) -> Tensor:
    """Return `function(x)`, computed in tiles of `tile` sequences. `tile` divides the batch; None means no tiling.

    If `keep_inputs_only` is set, only the input of each tile, a view of x, is kept for backward. A tile as large as the
    batch is one recomputed block. If it is not set, nothing is differentiated, and the tiles only run forward.
    """
    if tile is None:
        return function(x_BSD)
    assert x_BSD.shape[0] % tile == 0, "the tile divides the micro-batch"
    run = (lambda x_tile: recomputed(function, x_tile)) if keep_inputs_only else function
    if tile == x_BSD.shape[0]:
        return run(x_BSD)
    return torch.cat([run(x_tile) for x_tile in x_BSD.split(tile)])
