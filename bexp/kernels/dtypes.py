"""Number formats of the search core as torch knows them."""

from __future__ import annotations

import torch

from explorer.spec.model import DType

_TORCH_DTYPES = {
    DType.FLOAT32: torch.float32,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT16: torch.float16,
}


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype of `dtype`."""
    return _TORCH_DTYPES[dtype]
