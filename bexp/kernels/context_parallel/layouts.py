"""Layouts: which positions of a sequence a rank holds, and what its queries attend to as keys and values come by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """One block of attention: queries from `first_query` on, in a rank's own order, against keys before `num_keys`.

    A causal block is square: query i of those taken attends to keys 0 to i of those taken.
    """

    first_query: int
    num_keys: int
    causal: bool

    def num_pairs(self, local_length: int) -> int:
        """Pairs of a query and a key that it attends to."""
        num_queries = local_length - self.first_query
        return num_queries * (num_queries + 1) // 2 if self.causal else num_queries * self.num_keys


@dataclass(frozen=True)
class Layout:
    """A way to spread S positions over N ranks, S / N each, in increasing order on every rank.

    `chunks_per_rank` times N must divide S. `step` says what a rank's queries attend to, under a causal mask, of the
    block that another rank owns; null is nothing at all. Without a mask every layout attends to everything.
    """

    name: str
    chunks_per_rank: int
    positions: Callable[[int, int, int], Tensor]
    """(seq_length, num_ranks, rank) -> the rank's positions, int64 (S / N) on the CPU."""
    causal_step: Callable[[int, int, int], Step | None]
    """(rank, owner, local_length) -> the block."""

    def refusal(self, seq_length: int, num_ranks: int) -> str | None:
        """Why sequences of this length cannot be spread over so many ranks; null if they can."""
        multiple = self.chunks_per_rank * num_ranks
        if seq_length < multiple or seq_length % multiple:
            return (
                f"the {self.name} layout over {num_ranks} ranks takes sequence lengths that are a multiple of "
                f"{multiple}, not {seq_length}"
            )
        return None

    def steps(self, rank: int, num_ranks: int, local_length: int, *, causal: bool) -> tuple[Step | None, ...]:
        """What the rank attends to of its own block, of its predecessor's, of the one before that, and so on."""
        if not causal:
            return (Step(0, local_length, False),) * num_ranks
        return tuple(self.causal_step(rank, (rank - i) % num_ranks, local_length) for i in range(num_ranks))

    def num_pairs(self, rank: int, num_ranks: int, seq_length: int, *, causal: bool) -> int:
        """Pairs of query and key that the rank computes for one head of one sequence: its share of the work."""
        local_length = seq_length // num_ranks
        steps = self.steps(rank, num_ranks, local_length, causal=causal)
        return sum(step.num_pairs(local_length) for step in steps if step is not None)


def context_parallel_layout(name: str) -> Layout:
    """The layout called `name`; ValueError if there is none."""
    if name not in _LAYOUTS:
        raise ValueError(f"unknown context-parallel layout '{name}'; there are {', '.join(_LAYOUTS)}")
    return _LAYOUTS[name]


def _ring_positions(seq_length: int, num_ranks: int, rank: int) -> Tensor:
    length = seq_length // num_ranks
    return torch.arange(rank * length, (rank + 1) * length)


def _striped_positions(seq_length: int, num_ranks: int, rank: int) -> Tensor:
    return torch.arange(rank, seq_length, num_ranks)


def _zigzag_positions(seq_length: int, num_ranks: int, rank: int) -> Tensor:
    chunk = seq_length // (2 * num_ranks)
    starts = (rank, 2 * num_ranks - 1 - rank)
    return torch.cat([torch.arange(start * chunk, (start + 1) * chunk) for start in starts])


def _ring_step(rank: int, owner: int, length: int) -> Step | None:
    """Everything of an older block, nothing of a newer one."""
    return Step(0, length, owner == rank) if owner <= rank else None


def _striped_step(rank: int, owner: int, length: int) -> Step | None:
    """Token i of rank r stands at iN + r, so that of a later rank's block it sees the tokens before i, without i."""
    if owner <= rank:
        return Step(0, length, True)
    return Step(1, length - 1, True) if length > 1 else None


def _zigzag_step(rank: int, owner: int, length: int) -> Step | None:
    """An earlier rank's first chunk is older than both of ours, its second newer; a later rank's lie between ours."""
    if owner == rank:
        return Step(0, length, True)
    return Step(0, length // 2, False) if owner < rank else Step(length // 2, length, False)


_LAYOUTS = {
    layout.name: layout
    for layout in (
        # Contiguous chunks: Ring Attention (Liu et al., 2023, arXiv:2310.01889).
        Layout("ring", 1, _ring_positions, _ring_step),
        # Token i on rank i mod N: Striped Attention (Brandon et al., 2023, arXiv:2311.09431).
        Layout("striped", 1, _striped_positions, _striped_step),
        # Chunks r and 2N - 1 - r on rank r: Llama 3 (Grattafiori et al., 2024, arXiv:2407.21783, section 3.3.2).
        Layout("zigzag", 2, _zigzag_positions, _zigzag_step),
    )
}
LAYOUTS = tuple(_LAYOUTS)
"""Their names."""
