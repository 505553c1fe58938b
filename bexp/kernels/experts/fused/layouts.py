"""How the rows of a GEMM's operand lie in memory, and the sizes that every GEMM of the FFN needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from bexp.kernels.activations import Activation
from bexp.kernels.launcher import ALIGNMENT_BYTES, Pointer

Layout = Literal["rows", "tokens", "padded"]


@dataclass(frozen=True)
class FusedShape:
    """What the kernels are launched for: the sizes and number formats of an `ExpertFFN`, and the layout of its weights.

    `device` is the CUDA device's index; -1 is the CPU, where kernels are interpreted.
    """

    num_tokens: int
    top_k: int
    num_experts: int
    token_size: int
    hidden_size: int
    gated: bool
    activation: Activation
    dtype: torch.dtype
    in_transposed: bool
    out_transposed: bool
    device: int

    @property
    def num_pairs(self) -> int:
        """Token-expert pairs, one row each."""
        return self.num_tokens * self.top_k

    @property
    def pre_size(self) -> int:
        """Numbers that go into the activation of a row: of gate and up together."""
        return 2 * self.hidden_size if self.gated else self.hidden_size

    @property
    def place(self) -> torch.device:
        """The device."""
        return torch.device("cuda", self.device) if self.device >= 0 else torch.device("cpu")


@dataclass(frozen=True)
class Operand:
    """One factor of a product over rows: `num_rows` of `width` numbers.

    "rows" (R, .) are in the experts' order; "tokens" (T, .) are gathered by the GEMM itself; "padded" rows lie in tiles
    of `height`, with zeros behind each expert's last, as `gather_tiles` writes them.
    """

    pointer: Pointer
    num_rows: int
    width: int
    layout: Layout
    height: int = 1


class Workspace:
    """One allocation for what lives as long: `take` returns where a tensor lies in it."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self._name = name
        self._dtype = dtype
        self._num_bytes = 0

    def take(self, numel: int, dtype: torch.dtype | None = None) -> Pointer:
        """Room for that many numbers, in the workspace's own format unless `dtype` is given."""
        start = self._num_bytes
        num_bytes = numel * (dtype or self._dtype).itemsize
        self._num_bytes = start + -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return Pointer(self._name, start, dtype)

    @property
    def numel(self) -> int:
        """The workspace's length in numbers of its own format."""
        return self._num_bytes // self._dtype.itemsize
