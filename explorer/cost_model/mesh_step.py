"""A step on a mesh, composed of the blocks of one device, of described exchanges, and of a simulated pipeline."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

import numpy as np

from explorer.cost_model.collectives import ASSUMED_SLOWDOWN, Exchange
from explorer.cost_model.components import BlockRecompute, Component, ComponentKind
from explorer.cost_model.fabric_exchange import Group, Link, Transfer
from explorer.cost_model.mesh_layers import Block, MeshBlocks, MeshCandidate, MeshDecomposer, Sort
from explorer.cost_model.parameters import count_parameters
from explorer.cost_model.pipeline import PipelineRun, StageCosts, pipeline_seconds
from explorer.cost_model.pipeline_balance import balance_layers
from explorer.cost_model.step import MemoryParts
from explorer.spec.mesh import Mesh, Schedule
from explorer.spec.model import ModelSpec
from explorer.spec.request import ExplorationRequest
from explorer.spec.training import Sharding

T = TypeVar("T")

FLOAT32_BYTES = 4
WEIGHTS_SHARES = {ComponentKind.EMBEDDING: 1.0}
"""Share of a block's backward pass that computes gradients of weights, where it is not one half.

A matrix product has two in backward, one of which is for the weights.
"""
SCORES_BACKWARD = 2.5
"""Products of attention's scores in backward for each in forward; none of them is for weights."""


@dataclass(frozen=True, slots=True)
class BlockCost:
    """Seconds and bytes of a component; the bytes may be smaller by `spared_share`, which is 0 if measured."""

    device_seconds: float
    host_seconds: float
    forward_share: float
    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    relative_error: float
    spared_share: float = 0.0


Costs = Mapping[Component, BlockCost]


@dataclass(frozen=True, slots=True)
class _LayerCost:
    """Seconds and bytes of a layer for one micro-batch. The exchanges are part of `forward` and `backward`."""

    forward: float
    backward: float
    weights: float
    exchange: float
    saved_bytes: int
    transient_bytes: int
    makeup: Mapping[Component | Link, float]

    @property
    def seconds(self) -> float:
        """Both directions."""
        return self.forward + self.backward


@dataclass(frozen=True, slots=True)
class _Layers:
    """The blocks of a candidate with their costs, by sort of layer."""

    blocks: MeshBlocks
    by_sort: dict[Sort, _LayerCost]
    embedding: _LayerCost
    head: _LayerCost

    def parts(self, sorts: Counter[Sort], stage: int, num_stages: int) -> list[tuple[_LayerCost, int]]:
        """Return what a stage consists of, and how often."""
        found = [(self.by_sort[sort], count) for sort, count in sorts.items()]
        if stage == 0:
            found.append((self.embedding, 1))
        if stage == num_stages - 1:
            found.append((self.head, 1))
        return found


@dataclass(frozen=True, slots=True)
class MeshStep:
    """A step of a candidate.

    `compute_share`, `exchange_share` and `bubble_share` are those of all devices' time; the optimizer counts as
    computation. `makeup` has the share of the step that hangs on each component and each link, bubbles included.
    `layers` has the number of layers of each stage, `memory` the parts of the fullest rank. `exact` says that the
    pipeline was simulated, and not estimated.
    """

    seconds: float
    tokens_per_second: float
    micro_step_seconds: float
    optimizer_seconds: float
    communication_seconds: float
    num_micro_batches: int
    compute_share: float
    exchange_share: float
    bubble_share: float
    memory: MemoryParts
    fullest_rank: int
    layers: tuple[int, ...]
    makeup: dict[Component | Link, float]
    exact: bool


class MeshComposer:
    """Composes the steps of a plan's candidates."""

    def __init__(
        self, model: ModelSpec, request: ExplorationRequest, decompose: MeshDecomposer, optimizer: Component
    ) -> None:
        self._model = model
        self._request = request
        self._decompose = decompose
        self._fabric = decompose.fabric
        self._optimizer = optimizer
        self._costs: Costs | None = None
        self._known: dict[tuple[object, ...], _Layers] = {}
        self._balanced: dict[tuple[int, int], tuple[tuple[int, ...], list[Counter[Sort]]]] = {}
        self._optimizer_parameters = count_parameters(decompose.shard(optimizer.tensor_parallel_size))

    def components(self, found: MeshCandidate) -> tuple[Component, ...]:
        """Return what a candidate's step is made of; the optimizer is the same for all of them."""
        return (*self._decompose(found).components, self._optimizer)

    def step(self, found: MeshCandidate, costs: Costs, *, simulate: bool) -> MeshStep:
        """Return the step of a candidate.

        Without `simulate` the pipeline's time and memory are those of its closed forms, with the slowest rank's pace.
        """
        mesh, candidate = found.mesh, found.candidate
        layers = self._layers(found, costs)
        counts, stage_sorts = self._balance(mesh, layers)
        hidden = self._decompose.hidden_bytes(candidate)
        sent = self._fabric.send(hidden / mesh.tensor, Group(mesh.pipeline, mesh.tensor * mesh.data))
        held = [self._parameters(sorts, layers.blocks, mesh, stage) for stage, sorts in enumerate(stage_sorts)]
        parts = [layers.parts(sorts, stage, mesh.num_stages) for stage, sorts in enumerate(stage_sorts)]
        stages = [_stage(each, sent) for each in parts]
        exchanges = sum(count * part.exchange for each in parts for part, count in each)
        number = self._request.batch_size // (mesh.data * candidate.micro_batch_size)
        ranks = range(mesh.pipeline)
        # The rank with the most parameters exchanges and updates longest.
        last = max(ranks, key=lambda r: sum(dense + experts for dense, experts, _ in _each(held, r, mesh)))
        always, once, link = self._data_parallel(mesh, _each(held, last, mesh), _each(stages, last, mesh))
        update = self._optimizer_seconds(mesh, _each(held, last, mesh), costs)
        stages = [_slower(stage, always / mesh.virtual_stages) for stage in stages]
        seconds, run = self._run(stages, mesh, number, simulate=simulate)
        step = seconds + once + update
        memory, fullest = self._memory(mesh, stages, held, run, number)
        loads = [number * sum(stage.seconds for stage in _each(stages, r, mesh)) for r in ranks]
        slowest = max(ranks, key=lambda r: loads[r])
        exchanged = number * exchanges + mesh.pipeline * (number * always + once)
        busy = sum(loads) + mesh.pipeline * (once + update)
        every = mesh.pipeline * step
        return MeshStep(
            seconds=step,
            tokens_per_second=self._request.batch_size * self._model.seq_length / (mesh.num_devices * step),
            micro_step_seconds=loads[slowest] / number,
            optimizer_seconds=update,
            communication_seconds=once + number * always,
            num_micro_batches=number,
            compute_share=(busy - exchanged) / every,
            exchange_share=exchanged / every,
            bubble_share=max(0.0, 1.0 - busy / every),
            memory=memory,
            fullest_rank=fullest,
            layers=counts,
            makeup=self._makeup(_each(parts, slowest, mesh), (always, once, link), update, seconds, step),
            exact=simulate or mesh.pipeline == 1,
        )

    def _run(
        self, stages: Sequence[StageCosts], mesh: Mesh, number: int, *, simulate: bool
    ) -> tuple[float, PipelineRun | None]:
        loads = [sum(stage.seconds for stage in _each(stages, r, mesh)) for r in range(mesh.pipeline)]
        if mesh.schedule is None:
            return number * loads[0], None
        if simulate:
            return pipeline_seconds(stages, mesh.schedule, mesh.pipeline, number)
        fill = sum(loads) / len(loads) / mesh.virtual_stages
        if mesh.schedule is Schedule.ZB_H1:
            fill -= 2 * sum(stage.weights for stage in stages) / len(stages)
        hops = 2 * sum(stage.hand_over for stage in stages[:-1])
        return number * max(loads) + (mesh.pipeline - 1) * max(0.0, fill) + hops, None

    def _layers(self, found: MeshCandidate, costs: Costs) -> _Layers:
        """Return the costs of each sort of layer; meshes that differ in pipeline and data parallelism share them."""
        if self._costs is not costs:
            self._costs, self._known, self._balanced = costs, {}, {}
        mesh, key = found.mesh, (found.mesh.tensor, found.mesh.expert, found.candidate)
        if key not in self._known:
            blocks, hidden = self._decompose(found), self._decompose.hidden_bytes(found.candidate)
            by_sort = {sort: self._layer(each, costs, hidden, mesh, sort) for sort, each in blocks.blocks.items()}
            embedding, head = (
                self._layer((block,), costs, hidden, mesh, None) for block in (blocks.embedding, blocks.head)
            )
            self._known[key] = _Layers(blocks, by_sort, embedding, head)
        return self._known[key]

    def _balance(self, mesh: Mesh, layers: _Layers) -> tuple[tuple[int, ...], list[Counter[Sort]]]:
        """Return how many layers each stage has, and how many of each sort."""
        key = (id(layers), mesh.num_stages)
        if key not in self._balanced:
            counts = balance_layers(
                [layers.by_sort[sort].seconds for sort in layers.blocks.layers],
                mesh.num_stages,
                first=layers.embedding.seconds,
                last=layers.head.seconds,
            )
            cuts = pairwise(accumulate(counts, initial=0))
            self._balanced[key] = counts, [Counter(layers.blocks.layers[begin:end]) for begin, end in cuts]
        return self._balanced[key]

    def _layer(self, blocks: Sequence[Block], costs: Costs, hidden: int, mesh: Mesh, sort: Sort | None) -> _LayerCost:
        """Compose one layer; `sort` is null for embedding and head."""
        again = sort is not None and sort[1]
        forward = backward = weights = exchanged = 0.0
        device = sum(costs[block.component].device_seconds for block in blocks)
        host = sum(costs[block.component].host_seconds for block in blocks)
        held = peak = 0
        makeup: defaultdict[Component | Link, float] = defaultdict(float)
        whole = 1.0 - 1.0 / mesh.tensor
        for block in blocks:
            cost = costs[block.component]
            seconds = cost.device_seconds if device >= host else cost.host_seconds
            first = seconds * cost.forward_share
            rest = seconds - first
            forward, backward = forward + first, backward + rest
            passed = rest - first if block.component.recompute is BlockRecompute.FULL else rest
            weights += max(0.0, passed) * self._weights_share(block.component)
            makeup[block.component] += seconds
            passes = 3 if again else 2
            exchanged += passes * block.exchange_seconds
            forward += block.exchange_seconds
            backward += (passes - 1) * block.exchange_seconds
            for transfer in block.exchanges:
                makeup[transfer.link] += passes * transfer.seconds
            kept = round(block.sharded_outputs * whole * hidden)
            saved = max(0, cost.saved_bytes - kept)
            peak = max(peak, held + cost.forward_peak_bytes - kept, held + cost.backward_peak_bytes - kept)
            held += saved
        output = round(hidden / mesh.tensor)
        saved = output if again else held
        return _LayerCost(forward, backward, weights, exchanged, saved, max(0, peak + output - saved), makeup)

    def _weights_share(self, component: Component) -> float:
        """Return the share of the backward pass that computes gradients of weights, by its operations."""
        if component.kind is not ComponentKind.ATTENTION:
            return WEIGHTS_SHARES.get(component.kind, 0.5)
        shard = self._decompose.shard(component.tensor_parallel_size)
        width = shard.num_attention_heads * shard.head_size
        products = 2.0 * shard.hidden_size * (2 * width + 2 * shard.query_groups * shard.head_size)
        scores = 2.0 * shard.seq_length * width
        return products / (2.0 * products + SCORES_BACKWARD * scores)

    def _parameters(self, sorts: Counter[Sort], blocks: MeshBlocks, mesh: Mesh, stage: int) -> tuple[int, int, int]:
        """Return a stage's parameters, those of its experts that are spread, and those of its largest unit."""
        extra = blocks.embedding.parameters if stage == 0 else 0
        if stage == mesh.num_stages - 1:
            extra += blocks.head.parameters
            if self._model.tie_embeddings and mesh.pipeline > 1:  # the last rank has a copy of the embedding
                extra += self._decompose.shard(mesh.tensor).vocab_size * self._model.hidden_size
        dense, experts, largest = extra, 0, extra
        for sort, count in sorts.items():
            own = sum(block.parameters for block in blocks.blocks[sort])
            spread = sum(block.expert_parameters for block in blocks.blocks[sort])
            dense, experts, largest = dense + count * own, experts + count * spread, max(largest, own + spread)
        return dense, experts, largest

    def _data_parallel(
        self, mesh: Mesh, held: Sequence[tuple[int, int, int]], stages: Sequence[StageCosts]
    ) -> tuple[float, float, Link]:
        """Return what data parallelism adds to each micro-step and once to a step of a rank, and its slowest link."""
        if mesh.data == 1 and mesh.expert_data == 1:
            return 0.0, 0.0, Link.INTRA_NODE
        item = self._model.dtype.itemsize
        reduced = self._request.training.optimizer.gradient_dtype(self._model.dtype).itemsize
        dense, experts = sum(d for d, _, _ in held), sum(e for _, e, _ in held)
        groups = ((dense, Group(mesh.data, mesh.tensor)), (experts, Group(mesh.expert_data, mesh.expert)))
        gathers = [self._fabric.gather(number * item, group) for number, group in groups]
        reductions = [self._fabric.gather(number * reduced, group) for number, group in groups]
        gather = sum(each.seconds for each in gathers)
        reduction = sum(each.seconds for each in reductions)
        share = max(largest for _, _, largest in held) / (dense + experts)
        exchange = Exchange(mesh.sharding, exposed_share=share, again_share=1.0 - share)
        plain = mesh.sharding is Sharding.NONE
        rest = 2 * reduction if plain else reduction
        if mesh.sharding is Sharding.ZERO3:
            rest += exchange.again_share * gather
        always, once = exchange.visible_seconds(
            np.array([0.0 if plain else gather]),
            np.array([rest]),
            np.array([sum(stage.forward for stage in stages)]),
            np.array([sum(stage.backward for stage in stages)]),
            ASSUMED_SLOWDOWN,
        )
        link = max((*gathers, *reductions), key=lambda each: each.seconds).link
        return float(always[0]), float(once[0]), link

    def _optimizer_seconds(self, mesh: Mesh, held: Sequence[tuple[int, int, int]], costs: Costs) -> float:
        cost = costs[self._optimizer]
        seconds = max(cost.device_seconds, cost.host_seconds)
        dense, experts = sum(d for d, _, _ in held), sum(e for _, e, _ in held)
        if mesh.sharding is not Sharding.NONE:
            dense, experts = dense // mesh.data, experts // mesh.expert_data
        return seconds * (dense + experts) / self._optimizer_parameters

    def _memory(
        self,
        mesh: Mesh,
        stages: Sequence[StageCosts],
        held: Sequence[tuple[int, int, int]],
        run: PipelineRun | None,
        number: int,
    ) -> tuple[MemoryParts, int]:
        """Return the parts of the rank with the highest peak, and which one that is."""
        found = []
        for rank in range(mesh.pipeline):
            own = _each(stages, rank, mesh)
            saved = sum(stage.saved_bytes for stage in own)
            transient = max(stage.transient_bytes for stage in own)
            if run is None:
                activations = round(saved * _most_held(mesh, rank, number) / mesh.virtual_stages)
            else:
                activations = max(0, run.peak_bytes[rank] - transient)
            found.append(self._state(mesh, _each(held, rank, mesh), activations, transient))
        fullest = max(range(mesh.pipeline), key=lambda r: found[r].total)
        return found[fullest], fullest

    def _state(self, mesh: Mesh, held: Sequence[tuple[int, int, int]], activations: int, transient: int) -> MemoryParts:
        """Return the memory of one rank; the levels of sharding are those of `explorer.cost_model.step`."""
        spec, dtype, level = self._request.training.optimizer, self._model.dtype, mesh.sharding.level
        dense, experts = sum(d for d, _, _ in held), sum(e for _, e, _ in held)

        def kept(from_level: int) -> int:
            if level < 1:
                return dense + experts
            share = -(-dense // mesh.data) - (-experts // mesh.expert_data)
            return share if level >= from_level else dense + experts + share

        gathered = 0
        largest = max(each for _, _, each in held)
        if level >= 2:
            gathered = 2 * largest * (dtype.itemsize * (level == 3) + spec.gradient_dtype(dtype).itemsize)
        return MemoryParts(
            parameters=kept(3) * dtype.itemsize,
            gradients=kept(2) * spec.gradient_dtype(dtype).itemsize,
            master_weights=kept(1) * FLOAT32_BYTES if spec.has_master(dtype) else 0,
            optimizer_states=kept(1) * spec.num_states * spec.moment_dtype(dtype).itemsize,
            activations=activations,
            transient=transient + gathered,
        )

    def _makeup(
        self,
        parts: Sequence[Sequence[tuple[_LayerCost, int]]],
        reduced: tuple[float, float, Link],
        update: float,
        pipeline: float,
        step: float,
    ) -> dict[Component | Link, float]:
        """Return the share of the step that hangs on each component and link; bubbles are shared out like work."""
        found: defaultdict[Component | Link, float] = defaultdict(float)
        for part, count in (each for stage in parts for each in stage):
            for key, spent in part.makeup.items():
                found[key] += count * spent
        always, once, link = reduced
        found[link] += always
        scale = pipeline / sum(found.values())
        shares = {key: scale * seconds / step for key, seconds in found.items() if seconds > 0}
        shares[link] = shares.get(link, 0.0) + once / step
        shares[self._optimizer] = update / step
        return shares


def _each(of_stages: Sequence[T], rank: int, mesh: Mesh) -> Sequence[T]:
    """Return what belongs to the stages of a rank."""
    return of_stages[rank :: mesh.pipeline]


def _stage(parts: Sequence[tuple[_LayerCost, int]], sent: Transfer) -> StageCosts:
    return StageCosts(
        forward=sum(count * part.forward for part, count in parts),
        backward=sum(count * part.backward for part, count in parts),
        weights=sum(count * part.weights for part, count in parts),
        saved_bytes=sum(count * part.saved_bytes for part, count in parts),
        transient_bytes=max(part.transient_bytes for part, _ in parts),
        hand_over=sent.seconds,
    )


def _slower(stage: StageCosts, seconds: float) -> StageCosts:
    if not seconds:
        return stage
    return StageCosts(
        stage.forward,
        stage.backward + seconds,
        stage.weights,
        stage.saved_bytes,
        stage.transient_bytes,
        stage.hand_over,
    )


def _most_held(mesh: Mesh, rank: int, number: int) -> int:
    """Return how many micro-batches, each in one stage, a rank of an even pipeline holds at most."""
    after = mesh.pipeline - 1 - rank
    if mesh.schedule is Schedule.INTERLEAVED:
        return min(number * mesh.virtual_stages, 2 * after + (mesh.virtual_stages - 1) * mesh.pipeline + 1)
    if mesh.schedule is Schedule.ZB_H1:
        return min(number, mesh.pipeline)
    return min(number, after + 1)
