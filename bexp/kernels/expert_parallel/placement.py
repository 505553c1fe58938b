"""Which rows each rank sends and receives, from the routes of its own tokens.

Rank r of N owns the experts r E / N to (r + 1) E / N - 1. The pairs of token and expert are sorted by chunk of tokens
and then by expert, so that what goes to one rank in one chunk is contiguous. Pairs of shadowed experts come last: they
stay at home.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bexp.kernels.experts.rows import Rows, sorted_rows

MOST_KEYS = 1 << 15
"""Chunks times experts, with the shadowed ones: rows are sorted by keys of 16 bits."""


@dataclass(frozen=True)
class ChunkRows:
    """The rows of one chunk: how many go to each rank and come from it, and the local experts (R, 1) of the latter."""

    sent: list[int]
    received: list[int]
    routes: Tensor


@dataclass(frozen=True)
class PlacedRows:
    """The rows of a rank's tokens: `sizes` of them in each chunk, and then those that stay at home.

    `home_routes` (R, 1) are the places of the latter among the shadowed experts.
    """

    rows: Rows
    sizes: list[int]
    chunks: tuple[ChunkRows, ...]
    home_routes: Tensor


class Placement:
    """Sorts routes for a group of ranks; all of them call `place` together.

    Raises:
        ValueError: the experts cannot be spread like this.
    """

    def __init__(
        self, group: dist.ProcessGroup, num_experts: int, overlap_degree: int, shadowed_experts: tuple[int, ...]
    ) -> None:
        self.group, self.num_experts = group, num_experts
        self.num_chunks, self.shadowed = overlap_degree, shadowed_experts
        reason = refuse_placement(num_experts, group.size(), overlap_degree, shadowed_experts)
        if reason is not None:
            raise ValueError(reason)
        self.num_local = num_experts // group.size()
        self._keys_E = torch.arange(num_experts)
        self._keys_E[list(shadowed_experts)] = overlap_degree * num_experts + torch.arange(len(shadowed_experts))

    def place(self, routes_TK: Tensor) -> PlacedRows:
        """Place the routes (T, K) of this rank's tokens. The host waits for the device once, for the counts."""
        size, chunks, local = self.group.size(), self.num_chunks, self.num_local
        exchanged = chunks * self.num_experts
        rows = sorted_rows(self._keys(routes_TK), exchanged + len(self.shadowed), count=False)
        counts = torch.diff(rows.ends, prepend=rows.ends.new_zeros(1))
        sent_NCE = counts[:exchanged].view(chunks, size, local).transpose(0, 1).contiguous()
        received_NCE = torch.empty_like(sent_NCE)
        dist.all_to_all_single(received_NCE, sent_NCE, group=self.group)
        sums = (sent_NCE.sum(2).flatten(), received_NCE.sum(2).flatten(), counts[exchanged:])
        on_host = torch.cat(sums).tolist()
        sent, received = (on_host[i * size * chunks : (i + 1) * size * chunks] for i in (0, 1))
        at_home = on_host[2 * size * chunks :]
        found = tuple(
            ChunkRows(
                sent[chunk::chunks],
                received[chunk::chunks],
                _routes(received_NCE[:, chunk].flatten(), local, sum(received[chunk::chunks])),
            )
            for chunk in range(chunks)
        )
        home = _routes(counts[exchanged:], len(self.shadowed), sum(at_home))
        return PlacedRows(rows, [*(sum(chunk.sent) for chunk in found), sum(at_home)], found, home)

    def _keys(self, routes_TK: Tensor) -> Tensor:
        """Return the key of each pair: its chunk and expert, or a place behind them if its expert is shadowed."""
        keys = self._first_keys(routes_TK.device)[routes_TK] if self.shadowed else routes_TK
        if self.num_chunks == 1:
            return keys
        num_tokens = routes_TK.shape[0]
        chunk_T = torch.arange(num_tokens, device=routes_TK.device) * self.num_chunks // max(1, num_tokens)
        later = keys + self.num_experts * chunk_T.unsqueeze(1)
        return torch.where(keys < self.num_experts, later, keys) if self.shadowed else later

    def _first_keys(self, device: torch.device) -> Tensor:
        """Return the key of each expert's pairs in the first chunk, (E,)."""
        if self._keys_E.device != device:
            self._keys_E = self._keys_E.to(device)
        return self._keys_E


def refuse_placement(
    num_experts: int, num_ranks: int, overlap_degree: int, shadowed_experts: tuple[int, ...]
) -> str | None:
    """Return why the experts cannot be spread over so many ranks like this; null if they can."""
    if num_experts % num_ranks:
        return f"{num_experts} experts cannot be spread evenly over {num_ranks} ranks"
    if overlap_degree < 1:
        return f"overlap_degree must be at least 1, not {overlap_degree}"
    unknown = [expert for expert in shadowed_experts if not 0 <= expert < num_experts]
    if unknown:
        return f"shadowed_experts names {unknown[0]}, but the experts are 0 to {num_experts - 1}"
    if list(shadowed_experts) != sorted(set(shadowed_experts)):
        return "shadowed_experts must be in increasing order, each of them once"
    if overlap_degree * num_experts + len(shadowed_experts) >= MOST_KEYS:
        return f"overlap_degree ({overlap_degree}) is too large for {num_experts} experts"
    return None


def _routes(counts: Tensor, num_experts: int, num_rows: int) -> Tensor:
    """Return the expert of each row (R, 1), given how many rows each has, over and over again for each sender."""
    experts = torch.arange(counts.numel(), device=counts.device)
    if num_experts:
        experts %= num_experts
    return torch.repeat_interleave(experts, counts, output_size=num_rows).unsqueeze(1)
