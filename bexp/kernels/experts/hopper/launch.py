"""Arguments that every launch of a Hopper kernel needs. Triton's Gluon is imported when a tensor map is made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 8
"""Widths are multiples of this number of two-byte elements: rows of bulk copies start at multiples of 16 bytes."""
WARPS_OF_A_GROUP = 4
_FEWEST_EXPERTS = 32


def tensor_map(tensor: Tensor, block: list[int]) -> Any:
    """A descriptor of `tensor` for bulk copies of `block`, swizzled as the product instructions read it."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # noqa: PLC0415 - optional

    return TensorDescriptor.from_tensor(tensor, block, shared_layout(block, tensor))


def shared_layout(block: list[int], like: Tensor) -> Any:
    """The layout of a block in shared memory, in the dtype of `like` (bfloat16 or float16)."""
    from triton.experimental.gluon import language as gl  # noqa: PLC0415 - optional

    dtype = gl.bfloat16 if like.dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for(block, dtype)


def searched_experts(num_experts: int) -> int:
    """How many numbers a warp holds to search this many experts: the next power of two, at least a warp's lanes."""
    return max(_FEWEST_EXPERTS, 1 << (num_experts - 1).bit_length())


def most_row_tiles(num_rows: int, num_experts: int, block_m: int) -> int:
    """The most tiles of `block_m` rows that cover each expert's rows, however these are spread."""
    return num_rows // block_m + min(num_experts, num_rows)
