"""Arguments that every launch of a Hopper kernel needs. Triton's Gluon is imported when a layout is made."""

from __future__ import annotations

from typing import Any

import torch

from bexp.kernels.launcher import Blocks, Pointer

ALIGNMENT = 8
"""Widths are multiples of this number of two-byte elements: rows of bulk copies start at multiples of 16 bytes."""
WARPS_OF_A_GROUP = 4
_FEWEST_EXPERTS = 32


def tensor_map(pointer: Pointer, shape: tuple[int, ...], block: tuple[int, ...], dtype: torch.dtype) -> Blocks:
    """A contiguous tensor for bulk copies of `block`, swizzled as the product instructions read it."""
    return Blocks(pointer, shape, block, shared_layout(block, dtype))


def shared_layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    """The layout of a block in shared memory, for bfloat16 or float16."""
    from triton.experimental.gluon import language as gl  # noqa: PLC0415 - optional

    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for(list(block), element)


def searched_experts(num_experts: int) -> int:
    """How many numbers a warp holds to search this many experts: the next power of two, at least a warp's lanes."""
    return max(_FEWEST_EXPERTS, 1 << (num_experts - 1).bit_length())


def most_row_tiles(num_rows: int, num_experts: int, block_m: int) -> int:
    """The most tiles of `block_m` rows that cover each expert's rows, however these are spread."""
    return num_rows // block_m + min(num_experts, num_rows)
