"""What people do instead of a search: try sizes upwards, from the top, by bisection, or a few of them.

A strategy that has the name of a tool uses the plain candidate of a micro-batch size (torch's default attention, the
default expert back end, no tiling, no recomputation), as does the tool. A size that the product would leave out,
because it is predicted not to fit, counts as an out-of-memory error that costs nothing. A coordinate descent
chooses from the whole space of the product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from benchmarks.replay.bench import TrialBench
from benchmarks.replay.ground_truth import GroundTruth
from bexp.explorer.dimensions.bta_tile import BTA_TILE
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.recompute import Recompute

T = TypeVar("T")
Strategy = Callable[[TrialBench, int], Candidate | None]
"""Tries candidates on a bench with a seed; returns the one that it would train with."""

BACK_OFF = 0.9  # of accelerate.utils.find_executable_batch_size
DEEPSPEED_NUM_SIZES = 3  # num_tuning_micro_batch_sizes of DeepSpeed's autotuner
SIZE = ("micro_batch_size",)
SETTINGS = (
    SIZE,
    *(("expert_backend",), ("attention_backend",), ("recompute",), ("bta_tile",), ("loss",), ("execution",)),
    *(("kernels",), ("settings",), ("sharding",), ("context_parallel_size", "context_parallel_layout")),
)
"""What a coordinate descent changes, one after another. On the recorded tables no other order that was tried is
cheaper, and none has less regret."""


def powers_of_two(bench: TrialBench, _: int) -> Candidate | None:
    """Double the micro-batch until it does not fit, and take the last that did (Lightning's BatchSizeFinder)."""
    fitting = None
    for size in (m for m in _sizes(bench.truth) if m & (m - 1) == 0):
        candidate = _plain(bench.truth, size)
        if _try(bench, candidate) is None:
            break
        fitting = candidate
    return fitting


def backing_off_from_the_top(bench: TrialBench, _: int) -> Candidate | None:
    """Start at the largest micro-batch and back off by a factor of 0.9 until one fits.

    This is what Accelerate's find_executable_batch_size has done since July 2025. A size that is not legal stands for
    the next smaller legal one.
    """
    sizes = _sizes(bench.truth)
    size = sizes[-1]
    while True:
        candidate = _plain(bench.truth, size)
        if _try(bench, candidate) is not None:
            return candidate
        smaller = [m for m in sizes if m <= int(BACK_OFF * size)]
        if not smaller:
            return None
        size = smaller[-1]


def largest_that_fits(bench: TrialBench, _: int) -> Candidate | None:
    """The largest micro-batch that fits, by bisection (Composer's automatic microbatching)."""
    size = _largest(bench)
    return None if size is None else _plain(bench.truth, size)


def deepspeed_fast(bench: TrialBench, _: int) -> Candidate | None:
    """Find the largest size that fits, try a few evenly spaced below it, take the fastest (DeepSpeed's fast mode)."""
    largest = _largest(bench)
    if largest is None:
        return None
    sizes = _sizes(bench.truth)
    for target in np.linspace(sizes[0], largest, DEEPSPEED_NUM_SIZES):
        nearest = min(sizes, key=lambda m: (abs(m - float(target)), m))
        _try(bench, _plain(bench.truth, nearest))
    return bench.fastest()


def coordinate_descent(bench: TrialBench, _: int) -> Candidate | None:
    """Start at the base and change one setting at a time, until no change of one is faster.

    Of the sizes, it finds the largest that fits by bisection, and walks down from there while that is faster. Of any
    other setting, it tries each value.
    """
    truth = bench.truth
    legal = [truth.table.candidates[row] for row in np.flatnonzero(truth.legal_C)]
    speeds: dict[Candidate, float] = {}

    def speed(candidate: Candidate) -> float:
        if candidate not in speeds:
            speeds[candidate] = bench.run(truth.table.row[candidate]) or 0.0
        return speeds[candidate]

    best = next(c for c in (*truth.prune.bases, *legal) if bench.row(c) is not None)
    before = None
    while best != before:
        before = best
        for names in SETTINGS:
            others = [name for name in Candidate.model_fields if name not in names]
            near = [c for c in legal if all(getattr(c, name) == getattr(best, name) for name in others)]
            if names == SIZE:
                near = [_walk_sizes(sorted(near, key=lambda c: c.micro_batch_size), best, speed)]
            best = max((best, *near), key=speed)
    return best if speed(best) > 0 else None


def _try(bench: TrialBench, candidate: Candidate) -> float | None:
    row = bench.row(candidate)
    if row is None:
        bench.refuse()
        return None
    return bench.run(row)


def _walk_sizes(ladder: Sequence[Candidate], start: Candidate, speed: Callable[[Candidate], float]) -> Candidate:
    """Return the largest that fits, from `start` on, or the first below it whose next smaller one is not faster."""
    first = ladder.index(start)
    at = first + max(0, _bisect(ladder[first:], lambda candidate: speed(candidate) > 0))
    while at > 0 and speed(ladder[at - 1]) > speed(ladder[at]):
        at -= 1
    return ladder[at]


def _largest(bench: TrialBench) -> int | None:
    """The largest legal size whose plain candidate fits, if fitting is monotonous."""
    sizes = _sizes(bench.truth)
    at = _bisect(sizes, lambda size: _try(bench, _plain(bench.truth, size)) is not None)
    return sizes[at] if at >= 0 else None


def _bisect(ladder: Sequence[T], fits: Callable[[T], bool]) -> int:
    """Where the last that fits is, if fitting is monotonous; -1 if none does."""
    low, high = -1, len(ladder)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(ladder[middle]):
            low = middle
        else:
            high = middle
    return low


def _sizes(truth: GroundTruth) -> tuple[int, ...]:
    return truth.request.space.micro_batch_sizes


def _plain(truth: GroundTruth, size: int) -> Candidate:
    """Return the plainest settings that the request allows."""
    request, report = truth.request, truth.report
    policies = request.space.recompute_policies
    attention = request.attention_backends
    experts = request.expert_backends
    default_experts = report.default_experts if request.shapes.moe is not None else None
    return Candidate(
        micro_batch_size=size,
        bta_tile=next(iter(BTA_TILE.considered_for(size, request.space.place)), None),
        recompute=Recompute.NONE if Recompute.NONE in policies else policies[0],
        attention_backend=report.default_attention
        if attention is None or report.default_attention in attention
        else attention[0],
        expert_backend=default_experts if experts is None or default_experts in experts else experts[0],
        num_query_groups=request.shapes.query_groups,
    )
