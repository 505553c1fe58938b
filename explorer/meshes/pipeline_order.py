"""The order in which each rank of a pipeline runs forward and backward passes.

A pipeline of p ranks cuts the model into p * v stages. Rank r holds the stages r, r + p, r + 2p and so on: its v local
stages. The orders are those of `torch.distributed.pipelining`: 1F1B (Narayanan et al., 2021, arXiv:2104.04473, section
2.2.1) and interleaved 1F1B (the same, section 2.2.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from bexp.explorer.dimensions.parallelism import Schedule


class Pass(StrEnum):
    """The work of a rank on one micro-batch in one stage."""

    FORWARD = "F"
    BACKWARD = "B"


class PipelineAction(NamedTuple):
    """One pass over a micro-batch. Stages count from the embedding to the head, over all ranks."""

    kind: Pass
    stage: int
    micro_batch: int


def rank_order(
    schedule: Schedule, rank: int, num_ranks: int, num_micro_batches: int, virtual_stages: int = 1
) -> tuple[PipelineAction, ...]:
    """Return the passes of one rank in order.

    Interleaved 1F1B takes micro-batches in rounds of one size, which is num_ranks if that divides them.

    Raises:
        ValueError: there are fewer micro-batches than ranks, they cannot be divided into rounds, or the schedule has no
            virtual stages.
    """
    if num_micro_batches < num_ranks:
        raise ValueError(f"{num_micro_batches} micro-batches are fewer than the {num_ranks} ranks of a pipeline")
    interleaved = schedule is Schedule.INTERLEAVED
    if not interleaved and virtual_stages > 1:
        raise ValueError(f"schedule '{schedule}' has no virtual stages")
    rounds = num_micro_batches // num_ranks
    per_round, rest = divmod(num_micro_batches, rounds)
    if interleaved and rest:
        raise ValueError(f"{num_micro_batches} micro-batches do not divide into {rounds} rounds of one size")
    total = num_micro_batches * virtual_stages
    # A rank runs ahead of the next by one forward pass, and by two if several of its stages lie between.
    ahead = (2 if interleaved else 1) * (num_ranks - 1 - rank) + (virtual_stages - 1) * per_round
    warm_up = min(total, ahead)

    forward = _passes(Pass.FORWARD, range(virtual_stages), rank, num_ranks, per_round, total)
    backward = _passes(Pass.BACKWARD, range(virtual_stages - 1, -1, -1), rank, num_ranks, per_round, total)
    order = [next(forward) for _ in range(warm_up)]
    for done in range(total):
        if done < total - warm_up:
            order.append(next(forward))
        order.append(next(backward))
    return tuple(order)


def _passes(
    kind: Pass, local: range, rank: int, num_ranks: int, per_round: int, total: int
) -> Iterator[PipelineAction]:
    """Yield the passes of one kind: a round of micro-batches through each local stage, then the next round."""
    for step in range(total):
        turn, place = divmod(step, per_round)
        through, index = divmod(turn, len(local))
        yield PipelineAction(kind, local[index] * num_ranks + rank, through * per_round + place)
