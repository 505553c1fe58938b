"""How the rows of a GEMM's operand lie in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Layout = Literal["rows", "tokens", "padded"]


@dataclass(frozen=True)
class Operand:
    """One factor of a product over rows.

    "rows" (R, .) are in the experts' order; "tokens" (T, .) are gathered by the GEMM itself; "padded" rows lie in tiles
    of `height`, with zeros behind each expert's last, as `gather_tiles` writes them.
    """

    tensor: Tensor
    layout: Layout
    height: int = 1
