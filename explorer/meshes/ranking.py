"""The ranking of candidates by how likely they are to be the best, before and after blocks are measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bexp.explorer.dimensions.expert_modes import ExpertMode
from bexp.explorer.meshes.check import MeshChecks
from bexp.explorer.meshes.knowledge import MeshKnowledge, RankedCandidate
from bexp.explorer.meshes.layers import MeshCandidate
from bexp.explorer.meshes.posterior import sample_throughput
from bexp.explorer.meshes.step import MeshStep
from bexp.explorer.search.confidence import confidences

MOST_SCREENED = 4000
"""The most candidates that are ranked in one stage; of larger spaces, meshes are ranked first."""
BEST_MESHES = 96
FIRST_SIZES = 2
"""Micro-batch sizes that a mesh is first ranked by, the smallest ones."""
POOL = 128
"""Candidates that are ranked anew after each trial."""
SIMULATED = 16
"""Candidates whose pipelines are simulated after each trial; those of the others are estimated."""
MOST_ALIKE = 3
"""Candidates of the pool that differ only in schedule, virtual stages and sharding."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """The candidates of the pool that may fit, the fastest first, and how sure that is."""

    ranked: tuple[RankedCandidate, ...]
    best: int | None
    confidence: float
    chances: tuple[float, ...]


class MeshRanker:
    """Ranks the candidates of a space by its formulas, its measured blocks, and the whole models that ran."""

    def __init__(self, space: MeshKnowledge, checks: MeshChecks) -> None:
        self._space = space
        self._checks = checks
        self.smallest = 0
        """The fewest bytes that a candidate needs of a device, as of the last screening."""

    def screen(self) -> list[MeshCandidate]:
        """Return the candidates that formulas rank first, and the plainest, of those that may fit."""
        points: Sequence[MeshCandidate] = self._space.candidates
        if len(points) > MOST_SCREENED:
            points = self._of_best_meshes(points)
        ranked = self._rank_by_formulas(points)
        plainest = min((each for each, _ in ranked), key=plainness, default=None)
        pool: list[MeshCandidate] = []
        alike: Counter[tuple[object, ...]] = Counter()
        for each, _ in ranked:
            family = (each.mesh.block_key, each.mesh.pipeline, each.candidate)
            alike[family] += 1
            if len(pool) < POOL and alike[family] <= MOST_ALIKE:
                pool.append(each)
        return pool if plainest is None or plainest in pool else [*pool, plainest]

    def _of_best_meshes(self, points: Sequence[MeshCandidate]) -> Sequence[MeshCandidate]:
        """Return the candidates of the meshes whose smallest micro-batches are fastest."""
        sizes: dict[tuple[object, ...], list[int]] = {}
        for each in points:
            known = sizes.setdefault(each.mesh.family, [])
            if each.candidate.micro_batch_size not in known and len(known) < FIRST_SIZES:
                known.append(each.candidate.micro_batch_size)
        few = [each for each in points if each.candidate.micro_batch_size in sizes[each.mesh.family]]
        ranked = self._rank_by_formulas(few)
        meshes = set(list(dict.fromkeys(each.mesh.family for each, _ in ranked))[:BEST_MESHES])
        return [each for each in points if each.mesh.family in meshes]

    def _rank_by_formulas(self, points: Sequence[MeshCandidate]) -> list[tuple[MeshCandidate, MeshStep]]:
        steps = [(each, self._space.step(each)) for each in points]
        required = [self._least_bytes(each, step) for each, step in steps]
        self.smallest = min(required, default=0)
        fits = [pair for pair, size in zip(steps, required, strict=True) if size <= self._space.limit_bytes]
        return sorted(fits, key=lambda pair: -pair[1].tokens_per_second)

    def _least_bytes(self, point: MeshCandidate, step: MeshStep) -> int:
        """Return the least bytes that a candidate needs: all of them if its blocks are measured."""
        required = self._space.required_bytes(step)
        share = self._space.spared_share(point)
        return required - round(share * (step.memory.activations + step.memory.transient))

    def rank(self, pool: Sequence[MeshCandidate]) -> Ranking:
        """Rank the pool by what is known now; the pipelines of the fastest are simulated."""
        space = self._space
        refuted = self._checks.refuted
        ranked = [space.ranked(each) for each in pool if space.is_open(each) and each not in refuted]
        while True:
            ranked = [one for one in ranked if self._least_bytes(one.point, one.step) <= space.limit_bytes]
            ranked.sort(key=lambda one: -one.tokens_per_second)
            unsure = [i for i, one in enumerate(ranked[:SIMULATED]) if not one.step.exact]
            if not unsure:
                break
            for i in unsure:
                ranked[i] = space.ranked(ranked[i].point, simulate=True)
        best = next((i for i, one in enumerate(ranked) if one.known and one.step.exact), None)
        if not ranked:
            return Ranking((), None, 0.0, ())
        factors = [one.expected for one in ranked]
        samples = sample_throughput([one.step for one in ranked], space.error, space.request.seed, factors)
        chances = np.bincount(samples.argmax(axis=1), minlength=len(ranked)) / len(samples)
        confidence = 0.0
        if best is not None:
            confidence = float(confidences(samples[:, [best]], samples, space.request.tolerance)[0])
        return Ranking(tuple(ranked), best, confidence, tuple(chances.tolist()))


def plainness(point: MeshCandidate) -> tuple[int, ...]:
    """Order candidates for the base: least parallelism, least sharding, no recomputation, the smallest micro-batch."""
    mesh, candidate = point.mesh, point.candidate
    parallel = mesh.tensor * mesh.pipeline * mesh.expert
    mode = list(ExpertMode).index(mesh.expert_mode)
    return (
        parallel,
        mode,
        mesh.sharding.level,
        mesh.virtual_stages,
        candidate.recompute.rank[0],
        candidate.micro_batch_size,
    )
