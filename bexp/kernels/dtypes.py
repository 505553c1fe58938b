"""Names of number formats."""

from __future__ import annotations

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """The name that configurations use: `bfloat16`, not `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")
