"""The cases of the variable-sized GEMM table: how many rows each expert has, and how large its matrices are.

A case is (num_sequences, sequence_length, hidden_size, num_experts, top_k), as in a report on variable-sized batched
GEMMs for mixtures of experts, with an FFN of four times the hidden size. A token goes to `top_k` distinct experts, so
no expert gets more than 1 / top_k of the rows: where `top_k` is the number of experts, only the even load exists. The
report's own uneven load has such a `top_k`, so it is timed as plain GEMMs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

EVEN, UNEVEN = "even", "uneven"
REPORTED = (130_759, 78_925, 35_368, 90_425, 1_433, 120_455, 64_589, 2_134)
"""The load that was reported to be faster than the even one."""
_WIDTH = 128
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
    shrink: int = 1

    @property
    def name(self) -> str:
        """As the case is written."""
        sizes = (self.num_sequences, self.sequence_length, self.hidden_size, self.num_experts, self.top_k)
        return f"({', '.join(map(str, sizes))})"

    @property
    def num_tokens(self) -> int:
        """Tokens of a micro-batch."""
        return max(self.num_experts, self.num_sequences * self.sequence_length // self.shrink)

    @property
    def hidden(self) -> int:
        """Columns of a token."""
        return max(_WIDTH, self.hidden_size // self.shrink // _WIDTH * _WIDTH)

    @property
    def width(self) -> int:
        """Columns of the hidden activation."""
        return 4 * self.hidden

    def counts(self, load: str) -> tuple[int, ...]:
        """Rows of each expert."""
        rows = self.num_tokens * self.top_k
        if load == EVEN or self.top_k == self.num_experts:
            return split_evenly(rows, self.num_experts)
        return split_at_random(self.num_tokens, self.num_experts, self.top_k)

    @property
    def loads(self) -> tuple[str, ...]:
        """Those that distinct experts allow."""
        return (EVEN,) if self.top_k == self.num_experts else (EVEN, UNEVEN)

    @property
    def reported(self) -> dict[str, tuple[int, ...]]:
        """The report's uneven rows, and as many evenly."""
        uneven = tuple(count // self.shrink for count in REPORTED)
        return {EVEN: split_evenly(sum(uneven), len(uneven)), UNEVEN: uneven}

    def shrunk(self, shrink: int) -> Case:
        """The same case with fewer tokens and smaller widths."""
        return replace(self, shrink=shrink)


PAIR = Case(64, 1024, 512, 8, 8)
"""The case of the report's uneven load."""
CRASHED = Case(32, 512, 512, 8, 4)
"""The case in which Triton kernels were reported to access memory that is not theirs."""
LARGEST = Case(64, 1024, 4224, 8, 3)
CASES = (
    *(CRASHED, PAIR, Case(64, 1024, 2048, 8, 2), Case(64, 1024, 1024, 64, 8), Case(64, 1024, 1024, 8, 4)),
    *(Case(16, 512, 1024, 8, 2), Case(32, 1024, 1024, 8, 2), Case(64, 1024, 2048, 8, 4), LARGEST),
)


def split_evenly(rows: int, num_experts: int) -> tuple[int, ...]:
    """Return the most even split into whole rows."""
    return tuple(rows // num_experts + (expert < rows % num_experts) for expert in range(num_experts))


def split_at_random(num_tokens: int, num_experts: int, top_k: int) -> tuple[int, ...]:
    """Shares drawn uniformly from all that sum to one (a flat Dirichlet distribution); the same ones each time.

    Draws in which an expert has more rows than there are tokens are repeated.
    """
    rows = num_tokens * top_k
    generator = np.random.default_rng((rows, num_experts, top_k))
    for _ in range(_MAX_DRAWS):
        shares = generator.dirichlet(np.ones(num_experts))
        ends = np.round(np.cumsum(shares) * rows).astype(int)
        counts = np.diff(ends, prepend=0)
        if counts.max() <= num_tokens:
            return tuple(map(int, counts))
    raise ValueError(f"no random split over {num_experts} experts keeps each below 1 / {top_k}")


def routes_of(counts: tuple[int, ...], num_tokens: int) -> Tensor:
    """Distinct experts of each token (T, K), int64, with `counts` rows an expert, at most T each.

    The experts' rows one behind the other are dealt to the tokens in turn: rows of one expert go to different tokens.
    """
    assert max(counts) <= num_tokens, "a token goes to an expert once"
    experts = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    routes = experts.view(-1, num_tokens).T
    return routes[torch.randperm(num_tokens, generator=torch.Generator().manual_seed(0))].contiguous()
