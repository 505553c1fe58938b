"""What each rank sends and receives, from the routes of its own tokens.

Rank r of N owns the experts r E / N to (r + 1) E / N - 1. A token goes once to each rank that has any of its experts:
that is a row. With it travel its pairs, one for each of those experts. Pairs and rows are sorted by chunk of tokens,
then by rank, then by token, so that what goes to one rank in one chunk is contiguous. Pairs of shadowed experts come
last: they stay at home, each with a row of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bexp.kernels.expert_parallel.copies import Copies
from bexp.kernels.expert_parallel.peers import Peers, Splits

MOST_KEYS = 1 << 15
"""Chunks times ranks, home, and dropped: pairs are sorted by keys of 16 bits, in few passes of a radix sort."""


@dataclass(frozen=True)
class ChunkSplits:
    """How many rows and pairs of one chunk go to each rank, and come from it."""

    rows: Splits
    pairs: Splits


@dataclass(frozen=True)
class PlacedTokens:
    """The rows and pairs of a rank's tokens: `row_sizes` and `pair_sizes` of them in each chunk, and then at home.

    `copies` says which tokens the rows are. `order` (P,) are the places of the sorted pairs in the routes, and `codes`
    (P,) say the expert of each, as in `routes_of`, and which row it belongs to, as in `rows_of`. Dropped pairs are in
    neither.
    """

    copies: Copies
    order: Tensor
    codes: Tensor
    row_sizes: list[int]
    pair_sizes: list[int]
    chunks: tuple[ChunkSplits, ...]


def routes_of(codes: Tensor) -> Tensor:
    """Return the expert of each pair, (P, 1): the place among the experts of its rank, or among the shadowed ones."""
    return (codes // 2).to(torch.int64).unsqueeze(1)


def rows_of(codes: Tensor, num_rows: int) -> Copies:
    """Return which of the rows each pair belongs to; the code of a row's first pair is odd."""
    return Copies.of(torch.cumsum(codes % 2, 0) - 1, num_rows, in_order=True)


class Placement:
    """Sorts routes for a group of ranks; all of them call `place` together.

    Raises:
        ValueError: the experts cannot be spread like this.
    """

    def __init__(self, peers: Peers, num_experts: int, overlap_degree: int, shadowed_experts: tuple[int, ...]) -> None:
        self._peers, self.num_experts = peers, num_experts
        self.num_chunks, self.shadowed = overlap_degree, shadowed_experts
        reason = refuse_placement(num_experts, peers.size, overlap_degree, shadowed_experts)
        if reason is not None:
            raise ValueError(reason)
        self.num_local = num_experts // peers.size
        self._home = overlap_degree * peers.size
        rank_E, place_E = torch.arange(num_experts) // self.num_local, torch.arange(num_experts) % self.num_local
        rank_E[list(shadowed_experts)] = self._home
        place_E[list(shadowed_experts)] = torch.arange(len(shadowed_experts))
        self._rank_and_place_2E = torch.stack((rank_E, place_E))

    def place(self, routes_TK: Tensor, is_kept: Tensor | None = None) -> PlacedTokens:
        """Place the routes (T, K) of this rank's tokens. The host waits for the device once, for the counts.

        `is_kept` (T * K,) says which pairs are not dropped; None if none is.
        """
        num_tokens, top_k = routes_TK.shape
        if self._rank_and_place_2E.device != routes_TK.device:
            self._rank_and_place_2E = self._rank_and_place_2E.to(routes_TK.device)
        rank_TK, place_TK = self._rank_and_place_2E[:, routes_TK]
        keys = self._keys(rank_TK).to(torch.int16).flatten()
        if is_kept is not None:  # dropped pairs come behind all others, and are cut off when their number is known
            keys = keys.masked_fill(~is_kept, self._home + 1)
        keys_P, order = torch.sort(keys, stable=True)
        token_P = order // top_k
        first_P = torch.ones_like(token_P)
        first_P[1:] = (token_P.diff() != 0) | (keys_P.diff() != 0) | (keys_P[1:] == self._home)
        rows_P = first_P.cumsum(0)
        counts = self._counts(keys_P, rows_P)
        row_sizes, pair_sizes, chunks = self._share_counts(counts)
        order, token_P, rows_P, first_P = (each[: sum(pair_sizes)] for each in (order, token_P, rows_P, first_P))
        token_of_row = token_P.new_empty(sum(row_sizes)).scatter_(0, rows_P - 1, token_P)
        codes = (2 * place_TK.flatten()[order] + first_P).to(torch.int32)
        return PlacedTokens(Copies.of(token_of_row, num_tokens), order, codes, row_sizes, pair_sizes, chunks)

    def _keys(self, rank_TK: Tensor) -> Tensor:
        """Return the key of each pair: its chunk and rank; those that stay at home come behind all others."""
        if self.num_chunks == 1:
            return rank_TK
        num_tokens = rank_TK.shape[0]
        chunk_T = torch.arange(num_tokens, device=rank_TK.device) * self.num_chunks // max(1, num_tokens)
        return (rank_TK + self._peers.size * chunk_T.unsqueeze(1)).clamp_(max=self._home)

    def _counts(self, keys_P: Tensor, rows_P: Tensor) -> Tensor:
        """Return how many rows and pairs each key has, (2, keys); `rows_P` are the rows up to each pair."""
        keys = torch.arange(self._home + 1, dtype=keys_P.dtype, device=keys_P.device)
        pair_ends = torch.searchsorted(keys_P, keys, right=True)
        row_ends = torch.cat((rows_P.new_zeros(1), rows_P))[pair_ends]
        ends = torch.stack((row_ends, pair_ends))
        return ends.diff(prepend=ends.new_zeros(2, 1))

    def _share_counts(self, counts: Tensor) -> tuple[list[int], list[int], tuple[ChunkSplits, ...]]:
        """Return how many rows and pairs there are in each chunk and at home, and the splits of the chunks."""
        size, chunks = self._peers.size, self.num_chunks
        sent = counts[:, : self._home].view(2, chunks, size).permute(2, 1, 0).contiguous()
        received = self._peers.all_to_all_counts(sent)
        both = torch.stack((sent, received)).permute(2, 3, 0, 1).flatten()  # by chunk, rows and pairs, both ways, rank
        on_host = self._peers.read(torch.cat((both, counts[0, self._home :])))
        splits = [
            Splits(on_host[i : i + size], on_host[i + size : i + 2 * size]) for i in range(0, both.numel(), 2 * size)
        ]
        chunk_splits = tuple(ChunkSplits(*splits[2 * chunk : 2 * chunk + 2]) for chunk in range(chunks))
        at_home = on_host[-1]
        rows = [*(sum(chunk.rows.sent) for chunk in chunk_splits), at_home]
        return rows, [*(sum(chunk.pairs.sent) for chunk in chunk_splits), at_home], chunk_splits


def refuse_placement(
    num_experts: int, num_ranks: int, overlap_degree: int, shadowed_experts: tuple[int, ...]
) -> str | None:
    """Return why the experts cannot be spread over so many ranks like this; None if they can."""
    if num_experts % num_ranks:
        return f"{num_experts} experts cannot be spread evenly over {num_ranks} ranks"
    if overlap_degree < 1:
        return f"overlap_degree must be at least 1, not {overlap_degree}"
    unknown = [expert for expert in shadowed_experts if not 0 <= expert < num_experts]
    if unknown:
        return f"shadowed_experts names {unknown[0]}, but the experts are 0 to {num_experts - 1}"
    if list(shadowed_experts) != sorted(set(shadowed_experts)):
        return "shadowed_experts must be in increasing order, each of them once"
    if overlap_degree * num_ranks >= MOST_KEYS - 1:
        return f"overlap_degree ({overlap_degree}) is too large for {num_ranks} ranks"
    return None
