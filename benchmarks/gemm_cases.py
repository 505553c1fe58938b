"""The cases of the variable-sized GEMM table: how many rows each expert has, and how large its matrix is.

A case is (num_sequences, sequence_length, hidden_size, num_experts, top_k) with an FFN of four times the hidden size,
as in reports on variable-sized batched GEMMs for mixtures of experts. The product is the first projection, hidden_size
to 4 * hidden_size, for rows that are sorted by expert. Its backward computes both gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

Load = Literal["random", "even", "uneven"]
UNEVEN = (130_759, 78_925, 35_368, 90_425, 1_433, 120_455, 64_589, 2_134)
"""A distribution that was reported to be faster than the even split."""
_WIDTH = 32
"""Sizes stay multiples of this when cases are made smaller."""
_MAX_DRAWS = 10_000


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table; `shrink` divides tokens and widths, so that a small machine can run it."""

    num_sequences: int
    sequence_length: int
    hidden_size: int
    num_experts: int
    top_k: int
    load: Load = "random"
    shrink: int = 1

    @property
    def name(self) -> str:
        """As the case is written."""
        sizes = (self.num_sequences, self.sequence_length, self.hidden_size, self.num_experts, self.top_k)
        return f"({', '.join(map(str, sizes))})" + ("" if self.load == "random" else f" {self.load}")

    @property
    def k(self) -> int:
        """Columns of x."""
        return max(_WIDTH, self.hidden_size // self.shrink // _WIDTH * _WIDTH)

    @property
    def n(self) -> int:
        """Columns of the product."""
        return 4 * self.k

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows of each expert."""
        uneven = tuple(count // self.shrink for count in UNEVEN)
        if self.load == "uneven":
            return uneven
        if self.load == "even":  # with as many rows as the uneven one
            return split_evenly(sum(uneven), len(uneven))
        rows = max(1, self.num_sequences * self.sequence_length * self.top_k // self.shrink)
        return split_at_random(rows, self.num_experts, self.top_k)

    def operand_bytes(self, itemsize: int, *, training: bool) -> int:
        """Bytes that every implementation must hold: x, w and the product; in training also their gradients."""
        rows = sum(self.counts)
        forward = rows * (self.k + self.n) + self.num_experts * self.k * self.n
        return itemsize * (2 if training else 1) * forward

    def flops(self, *, training: bool) -> int:
        """FLOPs of the product, and in training of its two gradients."""
        return (6 if training else 2) * sum(self.counts) * self.k * self.n

    def shrunk(self, shrink: int) -> Case:
        """The same case with fewer tokens and smaller widths."""
        return replace(self, shrink=shrink)


TELLING = (Case(32, 512, 512, 8, 4), Case(64, 1024, 512, 8, 8), Case(64, 1024, 4224, 8, 3))
"""A case in which Triton kernels were reported to crash, that of the uneven distribution, and the largest."""
PAIR = (Case(64, 1024, 512, 8, 8, "even"), Case(64, 1024, 512, 8, 8, "uneven"))
OTHERS = (
    Case(64, 1024, 2048, 8, 2),
    Case(64, 1024, 1024, 8, 4),
    Case(64, 1024, 2048, 8, 4),
    Case(64, 1024, 4224, 8, 1),
    Case(64, 1024, 1024, 64, 8),
    Case(32, 1024, 1024, 8, 2),
    Case(16, 512, 1024, 8, 2),
)


def split_evenly(rows: int, num_experts: int) -> tuple[int, ...]:
    """Return the most even split into whole rows."""
    return tuple(rows // num_experts + (expert < rows % num_experts) for expert in range(num_experts))


def split_at_random(rows: int, num_experts: int, top_k: int) -> tuple[int, ...]:
    """Shares drawn uniformly from all that sum to one (a flat Dirichlet distribution); the same ones each time.

    A token goes to top_k distinct experts, so no expert can get more than 1 / top_k of the rows. Draws with a larger
    share are repeated. If top_k equals num_experts, only the even split is possible.
    """
    if top_k == num_experts:
        return split_evenly(rows, num_experts)
    generator = np.random.default_rng((rows, num_experts, top_k))
    for _ in range(_MAX_DRAWS):
        shares = generator.dirichlet(np.ones(num_experts))
        if shares.max() <= 1 / top_k:
            ends = np.round(np.cumsum(shares) * rows).astype(int)
            return tuple(int(count) for count in np.diff(ends, prepend=0))
    raise ValueError(f"no random split over {num_experts} experts keeps each below 1 / {top_k}")
