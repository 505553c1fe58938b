"""A pipeline: the layers of its stages, when each pass runs, simulated event by event, and what each rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from bexp.explorer.dimensions.parallelism import Schedule
from bexp.explorer.meshes.mesh import Mesh


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

    Raises ValueError if there are fewer micro-batches than ranks, they cannot be divided into rounds, or the
    schedule has no virtual stages.
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


SETTLED_ROUNDS = 4
"""Rounds of micro-batches after which a further round adds the same time as the one before."""


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Seconds and bytes of one stage for one micro-batch."""

    forward: float
    backward: float
    saved_bytes: int = 0
    """Held from the beginning of forward to the end of backward."""
    transient_bytes: int = 0
    """Alive in addition to the saved ones while a pass runs."""
    hand_over: float = 0.0
    """Seconds in which the output, or its gradient, reaches the next stage."""
    host_bound: bool = False
    """Whether the host, not the device, sets the pace."""

    @property
    def seconds(self) -> float:
        """Both directions."""
        return self.forward + self.backward


@dataclass(frozen=True, slots=True)
class TimedPass:
    """One pass of one rank, in seconds from the beginning of the step."""

    rank: int
    action: PipelineAction
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class PipelineRun:
    """A simulated step."""

    seconds: float
    """The time until the last rank is done."""
    busy_seconds: tuple[float, ...]
    """The time of it in which each rank computes."""
    peak_bytes: tuple[int, ...]
    """Those of each rank."""
    passes: tuple[TimedPass, ...]

    @property
    def bubble_share(self) -> float:
        """The share of all ranks' time in which they wait."""
        return 1.0 - sum(self.busy_seconds) / (len(self.busy_seconds) * self.seconds)


def simulate_pipeline(
    stages: Sequence[StageCosts], schedule: Schedule, num_ranks: int, num_micro_batches: int
) -> PipelineRun:
    """Run all micro-batches of a step through `stages`, which are those of all ranks from embedding to head.

    Each rank runs its passes in the order of the schedule, and each as soon as its input is there. Sending occupies no
    rank.

    Raises ValueError if the stages are no multiple of the ranks, or the schedule cannot run so many micro-batches.
    """
    virtual_stages, rest = divmod(len(stages), num_ranks)
    if rest or not virtual_stages:
        raise ValueError(f"{len(stages)} stages are no multiple of {num_ranks} ranks")
    orders = [rank_order(schedule, r, num_ranks, num_micro_batches, virtual_stages) for r in range(num_ranks)]
    ended: dict[PipelineAction, float] = {}
    place, free = [0] * num_ranks, [0.0] * num_ranks
    passes: list[TimedPass] = []
    waiting = set(range(num_ranks))
    while waiting:
        before = len(passes)
        for rank in sorted(waiting):
            order = orders[rank]
            while place[rank] < len(order):
                action = order[place[rank]]
                ready = _ready(action, ended, stages)
                if ready is None:
                    break
                begin = max(free[rank], ready)
                costs = stages[action.stage]
                end = begin + (costs.forward if action.kind is Pass.FORWARD else costs.backward)
                ended[action] = free[rank] = end
                passes.append(TimedPass(rank, action, begin, end))
                place[rank] += 1
            if place[rank] == len(order):
                waiting.discard(rank)
        assert len(passes) > before, "no schedule waits for itself"
    peaks = tuple(_peak_bytes(order, stages) for order in orders)
    busy = [0.0] * num_ranks
    for done in passes:
        busy[done.rank] += done.end - done.begin
    return PipelineRun(max(free), tuple(busy), peaks, tuple(passes))


def pipeline_seconds(
    stages: Sequence[StageCosts], schedule: Schedule, num_ranks: int, num_micro_batches: int
) -> tuple[float, PipelineRun]:
    """Return the seconds of a step, and a run of as many of its micro-batches as it takes to fill the pipeline.

    Once the pipeline is full, each further round of micro-batches takes as long as the one before, and holds as much.
    """
    rest = num_micro_batches % num_ranks
    few = SETTLED_ROUNDS * num_ranks + rest
    if num_micro_batches <= few + num_ranks:
        run = simulate_pipeline(stages, schedule, num_ranks, num_micro_batches)
        return run.seconds, run
    shorter = simulate_pipeline(stages, schedule, num_ranks, few)
    longer = simulate_pipeline(stages, schedule, num_ranks, few + num_ranks)
    rounds = (num_micro_batches - few - num_ranks) // num_ranks
    return longer.seconds + rounds * (longer.seconds - shorter.seconds), longer


def _ready(action: PipelineAction, ended: dict[PipelineAction, float], stages: Sequence[StageCosts]) -> float | None:
    """Return when the input of a pass is there; None if that is not known yet."""
    kind, stage, micro_batch = action
    own, other = 0.0, stage - 1
    if kind is Pass.BACKWARD:
        forward_end = ended.get(PipelineAction(Pass.FORWARD, stage, micro_batch))
        if forward_end is None:
            return None
        own, other = forward_end, stage + 1
    if not 0 <= other < len(stages):
        return own
    received = ended.get(PipelineAction(kind, other, micro_batch))
    return None if received is None else max(own, received + stages[min(stage, other)].hand_over)


def _peak_bytes(order: Sequence[PipelineAction], stages: Sequence[StageCosts]) -> int:
    """Return the most bytes that a rank holds."""
    held = peak = 0
    for action in order:
        costs = stages[action.stage]
        if action.kind is Pass.FORWARD:
            held += costs.saved_bytes
        peak = max(peak, held + costs.transient_bytes)
        if action.kind is Pass.BACKWARD:
            held -= costs.saved_bytes
    return peak


def most_held(mesh: Mesh, rank: int, number: int) -> int:
    """Return how many micro-batches, each in one stage, a rank of an even pipeline holds at most."""
    after = mesh.pipeline - 1 - rank
    if mesh.schedule is Schedule.INTERLEAVED:
        return min(number * mesh.virtual_stages, 2 * after + (mesh.virtual_stages - 1) * mesh.pipeline + 1)
    return min(number, after + 1)


HALVINGS = 40
"""Steps of the search for the shortest longest stage; each halves the interval that it lies in."""


def balance_layers(
    seconds: Sequence[float], num_stages: int, *, first: float = 0.0, last: float = 0.0
) -> tuple[int, ...]:
    """Return how many consecutive layers each stage holds, such that the longest stage is as short as it can be.

    `seconds` are those of the layers in order; `first` and `last` are those of embedding and head. Each stage has at
    least one layer. Of several ways to be as short, the one with most layers in the first stages is returned.

    Raises ValueError if there are fewer layers than stages.
    """
    if num_stages > len(seconds):
        raise ValueError(f"{len(seconds)} layers are fewer than {num_stages} stages")
    low, high = 0.0, first + sum(seconds) + last
    best = _fill(seconds, num_stages, high, first, last)
    assert best is not None, "the sum of all is long enough"
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        counts = _fill(seconds, num_stages, middle, first, last)
        if counts is None:
            low = middle
        else:
            high, best = middle, counts
    return best


def _fill(seconds: Sequence[float], num_stages: int, limit: float, first: float, last: float) -> tuple[int, ...] | None:
    """Return the layers of each stage if every stage takes as many as `limit` allows; None if some are left over."""
    counts, place = [], 0
    for stage in range(num_stages):
        taken = first if stage == 0 else 0.0
        extra = last if stage == num_stages - 1 else 0.0
        end = len(seconds) - (num_stages - 1 - stage)  # each later stage needs a layer
        begin = place
        while place < end and taken + seconds[place] + extra <= limit * (1 + 1e-12):
            taken += seconds[place]
            place += 1
        if place == begin:
            return None
        counts.append(place - begin)
    return tuple(counts) if place == len(seconds) else None
