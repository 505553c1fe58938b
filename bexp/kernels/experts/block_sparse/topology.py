"""Which blocks of the experts' hidden activations exist, and rows padded so that a block has one expert.

If the rows of expert e meet only the columns of expert e, the activations of all experts are a block-diagonal matrix of
(rows, E * width) whose blocks differ in height. It is stored as a sparse matrix of blocks of a fixed size (Gale et al.,
2023, MegaBlocks, MLSys).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bexp.kernels.experts.rows import Rows, sorted_rows


@dataclass(frozen=True)
class Topology:
    """The places of the blocks, in the order of their rows (BCSR), and of their columns. All int32, on the device.

    `offsets` (block rows + 1,) into the blocks; `row_indices`, `column_indices` (blocks,); `offsets_t` (block columns
    + 1,) into `blocks_t` (blocks,), which are the blocks sorted by column and then row.
    """

    block: int
    columns_per_expert: int
    offsets: Tensor
    row_indices: Tensor
    column_indices: Tensor
    offsets_t: Tensor
    blocks_t: Tensor

    @property
    def num_blocks(self) -> int:
        """Blocks that exist."""
        return self.row_indices.shape[0]

    @property
    def num_block_rows(self) -> int:
        """Block rows, each of one expert."""
        return self.offsets.shape[0] - 1

    @property
    def num_block_columns(self) -> int:
        """Block columns of all experts."""
        return self.offsets_t.shape[0] - 1


def block_topology(counts: tuple[int, ...], width: int, block: int, device: torch.device) -> Topology:
    """For experts with `counts` rows before padding and `width` columns each, a multiple of `block`."""
    assert width % block == 0, "a block column has one expert"
    columns_per_expert = width // block
    block_rows = [-(-count // block) for count in counts]
    num_block_rows = sum(block_rows)
    heights = torch.tensor(block_rows, dtype=torch.int32).to(device, non_blocking=True)
    experts = torch.arange(len(counts), dtype=torch.int32, device=device)
    expert_of_row = torch.repeat_interleave(experts, heights, output_size=num_block_rows)
    columns = torch.arange(columns_per_expert, dtype=torch.int32, device=device)
    column_indices = (expert_of_row[:, None] * columns_per_expert + columns).reshape(-1)
    rows = torch.arange(num_block_rows, dtype=torch.int32, device=device)
    in_columns = torch.repeat_interleave(heights, columns_per_expert).cumsum(0, dtype=torch.int32)
    return Topology(
        block=block,
        columns_per_expert=columns_per_expert,
        offsets=torch.arange(num_block_rows + 1, dtype=torch.int32, device=device) * columns_per_expert,
        row_indices=rows.repeat_interleave(columns_per_expert),
        column_indices=column_indices,
        offsets_t=torch.cat((in_columns.new_zeros(1), in_columns)),
        blocks_t=torch.argsort(column_indices, stable=True).to(torch.int32),
    )


def blocked_rows(routes_TK: Tensor, num_experts: int, block: int) -> Rows:
    """The rows of every expert padded to whole blocks; `counts` are those before padding. Waits for the device once.

    A row without a pair repeats token 0; with a weight of 0 it adds nothing to the result or to a gradient.
    """
    rows = sorted_rows(routes_TK, num_experts, count=True)
    padded = [-(-count // block) * block for count in rows.counts]
    ends = torch.tensor(padded, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    moved = (ends - torch.tensor(padded, dtype=torch.int32)).to(routes_TK.device, non_blocking=True)
    moved -= torch.cat((rows.ends.new_zeros(1), rows.ends[:-1]))
    experts = routes_TK.reshape(-1)
    row_of_pair = rows.row_of_pair + moved[experts]
    pairs = torch.arange(experts.numel(), device=experts.device)
    token_of_row = torch.zeros(sum(padded), dtype=torch.int64, device=experts.device)
    token_of_row.scatter_(0, row_of_pair, pairs // routes_TK.shape[1])
    return Rows(token_of_row, row_of_pair, ends.to(routes_TK.device, non_blocking=True), rows.counts)
