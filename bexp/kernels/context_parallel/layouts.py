"""Layouts: which positions of a sequence a rank holds, and what its queries attend to in each block of keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RingStep:
    """One block of attention: a rank's queries from `first_query` on, against the first `num_keys` keys.

    Both are counted in their rank's own order. A causal block is square: its query i attends to its keys 0 to i.
    """

    first_query: int
    num_keys: int
    causal: bool

    def num_pairs(self, local_length: int) -> int:
        """The number of pairs of a query and a key that it attends to."""
        num_queries = local_length - self.first_query
        return num_queries * (num_queries + 1) // 2 if self.causal else num_queries * self.num_keys


@dataclass(frozen=True)
class Layout:
    """A way to spread S positions over N ranks. Each rank holds S / N of them, in increasing order.

    `chunks_per_rank` times N must divide S. `step` says which part of the block of another rank this rank's queries
    attend to under a causal mask; None means none of it. Without a mask they attend to everything in every layout.
    """

    name: str
    chunks_per_rank: int
    positions: Callable[[int, int, int], Tensor]
    """(seq_length, num_ranks, rank) -> the rank's positions, int64 (S / N) on the CPU."""
    causal_step: Callable[[int, int, int], RingStep | None]
    """(rank, owner, local_length) -> the block."""

    def refusal(self, seq_length: int, num_ranks: int) -> str | None:
        """Return why sequences of this length cannot be spread over `num_ranks` ranks; None if they can."""
        multiple = self.chunks_per_rank * num_ranks
        if seq_length < multiple or seq_length % multiple:
            return (
                f"the {self.name} layout over {num_ranks} ranks takes sequence lengths that are a multiple of "
                f"{multiple}, not {seq_length}"
            )
        return None

    def steps(self, rank: int, num_ranks: int, local_length: int, *, causal: bool) -> tuple[RingStep | None, ...]:
        """Return what the rank attends to in its own block, in its predecessor's, in the one before that, and so on."""
        if not causal:
            return (RingStep(0, local_length, False),) * num_ranks
        return tuple(self.causal_step(rank, (rank - i) % num_ranks, local_length) for i in range(num_ranks))

    def num_pairs(self, rank: int, num_ranks: int, seq_length: int, *, causal: bool) -> int:
        """Return the pairs of query and key that the rank computes for one head of one sequence."""
        local_length = seq_length // num_ranks
        steps = self.steps(rank, num_ranks, local_length, causal=causal)
        return sum(step.num_pairs(local_length) for step in steps if step is not None)


def context_parallel_layout(name: str) -> Layout:
    """Return the layout called `name`. Raises ValueError if there is none."""
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


def _ring_step(rank: int, owner: int, length: int) -> RingStep | None:
    """Attend to all of an older block and to nothing of a newer one."""
    return RingStep(0, length, owner == rank) if owner <= rank else None


def _striped_step(rank: int, owner: int, length: int) -> RingStep | None:
    """Token i of rank r is at position iN + r. It sees token i of an earlier rank, but not of a later one."""
    if owner <= rank:
        return RingStep(0, length, True)
    return RingStep(1, length - 1, True) if length > 1 else None


def _zigzag_step(rank: int, owner: int, length: int) -> RingStep | None:
    """An earlier rank's first chunk is before both of ours, its second after them. A later rank's lie between ours."""
    if owner == rank:
        return RingStep(0, length, True)
    return RingStep(0, length // 2, False) if owner < rank else RingStep(length // 2, length, False)


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
