"""The memory layouts of the experts' matrices. Kernels read both layouts, so that no step copies a weight."""

from __future__ import annotations

from torch import Tensor

from bexp.kernels.launcher import ALIGNMENT_BYTES
from bexp.kernels.triton_support import aligned


def stored(w: Tensor) -> tuple[Tensor, bool]:
    """Return the contiguous tensor behind `w` (E, K, N), and whether it is stored transposed, as (E, N, K).

    A `w` that is neither is copied.
    """
    if w.is_contiguous():
        return w, False
    matrices = w.mT
    return (matrices, True) if matrices.is_contiguous() else (w.contiguous(), False)


def aligned_matrices(w: Tensor) -> Tensor:
    """`w` (E, K, N) in the layout that it has, copied only if its storage does not start at a multiple of 16 bytes."""
    if w.data_ptr() % ALIGNMENT_BYTES == 0 and (w.is_contiguous() or w.mT.is_contiguous()):
        return w
    matrices, transposed = stored(w)
    matrices = aligned(matrices)
    return matrices.mT if transposed else matrices
