"""A step on a mesh, composed of the blocks of its devices, of their transfers, and of a simulated pipeline."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TypeVar

import numpy as np

from bexp.explorer.cost.collectives import ASSUMED_SLOWDOWN, ShardingCommunication
from bexp.explorer.cost.components import Component, Operation
from bexp.explorer.cost.parameters import count_parameters
from bexp.explorer.cost.step import GatheredBytes, MemoryParts
from bexp.explorer.meshes.costs import Costs, DeviceShare, LayerCost, LayerCosts, Makeup, compose_layer, stage_costs
from bexp.explorer.meshes.layers import MeshCandidate, MeshDecomposer, Sort
from bexp.explorer.meshes.memory import HeldParameters, rank_memory
from bexp.explorer.meshes.mesh import Mesh, MeshRun
from bexp.explorer.meshes.pipeline import PipelineRun, StageCosts, balance_layers, most_held, pipeline_seconds
from bexp.explorer.meshes.transfers import Group
from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.model.model import ModelSpec
from bexp.explorer.model.training import Sharding
from bexp.explorer.request.request import ExplorationRequest

T = TypeVar("T")
NONE_GATHERED = GatheredBytes(0, 0)


@dataclass(frozen=True, slots=True)
class MeshStep:
    """A step of a candidate.

    Without a pipeline, `num_micro_batches` micro-steps, the optimizer and the communication add up to `seconds`. With
    one, bubbles and the hand-overs of stages come on top.
    """

    seconds: float
    tokens_per_second: float
    micro_step_seconds: float
    """Those of the slowest rank, without the communication."""
    optimizer_seconds: float
    communication_seconds: float
    """Added by data parallelism to all micro-steps of a step, and once for sums of gradients."""
    num_micro_batches: int
    compute_share: float
    """Of all devices' time, as are `exchange_share` and `bubble_share`; the optimizer counts as computation."""
    exchange_share: float
    bubble_share: float
    memory: MemoryParts
    """The parts of the fullest rank."""
    fullest_rank: int
    layers: tuple[int, ...]
    """The number of layers of each stage."""
    makeup: Makeup
    """The share of the step that each part takes, bubbles included."""
    exact: bool
    """Whether nothing was estimated."""
    run: PipelineRun | None = None
    """The pipeline as it was simulated; None if there is none or if it was estimated."""
    host_bound: bool = False
    """Whether a stage waits for its host."""


class MeshComposer:
    """Composes the steps of candidates."""

    def __init__(
        self,
        model: ModelSpec,
        request: ExplorationRequest,
        decompose: MeshDecomposer,
        optimizer: Component,
        hardware: HardwareSpec,
    ) -> None:
        self._model = model
        self._bandwidth = hardware.memory_bandwidth_bytes_per_second
        self._workspaces = hardware.workspace_bytes
        self._request = request
        self._decompose = decompose
        self.transfers = decompose.transfers
        self._optimizer = optimizer
        self._costs: Costs | None = None
        self._known: dict[tuple[object, ...], LayerCosts] = {}
        self._balanced: dict[tuple[object, ...], tuple[tuple[int, ...], list[Counter[Sort]]]] = {}
        self._optimizer_parameters = count_parameters(decompose.shard(optimizer.tensor_parallel_size))

    def components(self, point: MeshCandidate) -> tuple[Component, ...]:
        """Return the components of a candidate's step; the optimizer is the same for all of them."""
        return (*self._decompose(point).components, self._optimizer)

    def step(self, point: MeshCandidate, costs: Costs, *, simulate: bool, run: MeshRun | None = None) -> MeshStep:
        """Return the step of a candidate; `run` gives the layers of each stage and the number of micro-batches.

        Without `simulate`, closed forms give the pipeline's time and memory, at the pace of the slowest rank.
        """
        mesh, candidate = point.mesh, point.candidate
        layers = self._layers(point, costs)
        counts, stage_sorts = self._balance(mesh, layers, None if run is None else run.layers_per_stage)
        hidden = self._decompose.hidden_bytes(candidate)
        sent = self.transfers.take(Operation.SEND, hidden / mesh.tensor, Group(mesh.pipeline, mesh.tensor * mesh.data))
        shard = self._decompose.shard(mesh.tensor)
        each_stage = [
            HeldParameters.of_stage(sorts, layers.blocks, mesh, stage, shard) for stage, sorts in enumerate(stage_sorts)
        ]
        parts = [layers.parts(sorts, stage, mesh.num_stages) for stage, sorts in enumerate(stage_sorts)]
        # torch's pipelines reduce gradients at the end of a step, when no activations are left.
        is_late = mesh.pipeline > 1
        spec = self._request.training.optimizer
        gathered = [NONE_GATHERED if is_late else each.gathered(mesh, self._model, spec) for each in each_stage]
        last_stage = mesh.num_stages - 1
        issued = [((s > 0) + (s < last_stage)) * sent.host_seconds for s in range(mesh.num_stages)]
        stages = [stage_costs(*each, sent, layers) for each in zip(parts, gathered, issued, strict=True)]
        transferred = sum(count * part.transfers for each in parts for part, count in each)
        batch = self._request.effective_batch_size
        if run is not None:
            batch = run.num_micro_batches * mesh.data * candidate.micro_batch_size
        number = batch // (mesh.data * candidate.micro_batch_size)
        ranks = range(mesh.pipeline)
        # The rank with the most parameters exchanges and updates longest.
        held = [HeldParameters.of_rank(_each(each_stage, r, mesh)) for r in ranks]
        last = max(ranks, key=lambda r: held[r].number)
        always, once = self._data_parallel(mesh, held[last], _each(stages, last, mesh))
        update = self._optimizer_seconds(mesh, held[last], costs)
        stages = [replace(each, backward=each.backward + always / mesh.virtual_stages) for each in stages]
        seconds, simulated = self._run(stages, mesh, number, simulate=simulate)
        at_end = once + self._sum_of_tied(mesh, shard) + self._sum_of_repeated(mesh, each_stage)
        step = seconds + at_end + update
        memory, fullest = self._memory(mesh, stages, held, simulated, number, round(hidden / mesh.tensor))
        loads = [number * sum(stage.seconds for stage in _each(stages, r, mesh)) for r in ranks]
        slowest = max(ranks, key=lambda r: loads[r])
        communicated = number * transferred + mesh.pipeline * (number * always + at_end)
        busy = sum(loads) + mesh.pipeline * (at_end + update)
        every = mesh.pipeline * step
        return MeshStep(
            seconds=step,
            tokens_per_second=batch * self._model.seq_length / (mesh.num_devices * step),
            micro_step_seconds=loads[slowest] / number - always,
            optimizer_seconds=update,
            communication_seconds=at_end + number * always,
            num_micro_batches=number,
            compute_share=(busy - communicated) / every,
            exchange_share=communicated / every,
            bubble_share=max(0.0, 1.0 - busy / every),
            memory=memory,
            fullest_rank=fullest,
            layers=counts,
            makeup=self._makeup(_each(parts, slowest, mesh), always, at_end, update, seconds, step),
            exact=simulate or mesh.pipeline == 1,
            run=simulated,
            host_bound=any(stage.host_bound for stage in stages),
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
        hops = 2 * sum(stage.hand_over for stage in stages[:-1])
        return number * max(loads) + (mesh.pipeline - 1) * fill + hops, None

    def _layers(self, point: MeshCandidate, costs: Costs) -> LayerCosts:
        """Return the costs of each sort of layer; meshes that differ in pipeline and data parallelism share them."""
        if self._costs is not costs:
            self._costs, self._known, self._balanced = costs, {}, {}
        mesh, key = point.mesh, (point.mesh.block_key, point.candidate)
        if key not in self._known:
            blocks, hidden = self._decompose(point), self._decompose.hidden_bytes(point.candidate)
            share = DeviceShare(hidden, self._bandwidth)
            by_sort = {sort: compose_layer(each, costs, share, mesh, sort) for sort, each in blocks.blocks.items()}
            embedding, head = (
                compose_layer((block,), costs, share, mesh, None) for block in (blocks.embedding, blocks.head)
            )
            self._known[key] = LayerCosts(blocks, by_sort, embedding, head)
        return self._known[key]

    def _balance(
        self, mesh: Mesh, layers: LayerCosts, given: tuple[int, ...] | None
    ) -> tuple[tuple[int, ...], list[Counter[Sort]]]:
        """Return how many layers each stage has, and how many of each sort."""
        key = (id(layers), given or mesh.num_stages)
        if key not in self._balanced:
            counts = given or balance_layers(
                [layers.by_sort[sort].seconds for sort in layers.blocks.layers],
                mesh.num_stages,
                first=layers.embedding.seconds,
                last=layers.head.seconds,
            )
            cuts = pairwise(accumulate(counts, initial=0))
            self._balanced[key] = counts, [Counter(layers.blocks.layers[begin:end]) for begin, end in cuts]
        return self._balanced[key]

    def _data_parallel(self, mesh: Mesh, held: HeldParameters, stages: Sequence[StageCosts]) -> tuple[float, float]:
        """Return the cost of data parallelism, for each micro-step and once for a step of a rank."""
        if mesh.data == 1 and mesh.expert_data == 1:
            return 0.0, 0.0
        item = self._model.dtype.itemsize
        reduced = self._request.training.optimizer.gradient_dtype(self._model.dtype).itemsize
        groups = ((held.dense, Group(mesh.data, mesh.tensor)), (held.experts, Group(mesh.expert_data, mesh.expert)))
        gather = sum(self.transfers.gather(number * item, group).seconds for number, group in groups)
        reduction = sum(self.transfers.gather(number * reduced, group).seconds for number, group in groups)
        plain = mesh.sharding is Sharding.NONE
        is_late = reduces_late(mesh)
        # Whole gradients that are summed after backward are divided there, too: each is read and written.
        divided = held.number if is_late and plain else held.experts
        divisions = 2 * divided * reduced / self._bandwidth if mesh.data > 1 else 0.0
        share = held.largest / held.number
        communication = ShardingCommunication(mesh.sharding, exposed_share=share, again_share=1.0 - share)
        rest = 2 * reduction if plain else reduction
        if mesh.sharding is Sharding.ZERO3:
            rest += communication.again_share * gather
        always, once = communication.visible_seconds(
            np.array([0.0 if plain else gather]),
            np.array([0.0 if is_late else rest]),
            np.array([sum(stage.forward for stage in stages)]),
            np.array([sum(stage.backward for stage in stages)]),
            ASSUMED_SLOWDOWN,
        )
        return float(always[0]), float(once[0]) + (rest if is_late else 0.0) + divisions

    def _sum_of_tied(self, mesh: Mesh, shard: ModelSpec) -> float:
        """Return the seconds of summing a tied embedding's gradients over the first and the last rank.

        Each has a copy. Two ranks sum by sending each other one half of the gradients, and then one half of the sum.
        """
        if mesh.pipeline == 1 or not shard.tie_embeddings:
            return 0.0
        item = self._request.training.optimizer.gradient_dtype(shard.dtype).itemsize
        size = shard.vocab_size * shard.hidden_size * item
        return self.transfers.take(Operation.SEND, size, Group(mesh.pipeline, mesh.tensor * mesh.data)).seconds

    def _sum_of_repeated(self, mesh: Mesh, stages: Sequence[HeldParameters]) -> float:
        """Return the seconds of summing gradients that tensor-parallel devices have whole, of their heads or tokens.

        A rank of a pipeline sums them stage by stage after backward; the slowest one counts.
        """
        item = self._request.training.optimizer.gradient_dtype(self._model.dtype).itemsize
        sums = [self.transfers.gather(stage.repeated * item, Group(mesh.tensor, 1)).seconds for stage in stages]
        return 2 * max(sum(_each(sums, r, mesh)) for r in range(mesh.pipeline))

    def _optimizer_seconds(self, mesh: Mesh, held: HeldParameters, costs: Costs) -> float:
        cost = costs[self._optimizer]
        seconds = max(cost.device_seconds, cost.host_seconds)
        number = held.number if mesh.sharding is Sharding.NONE else held.share(mesh)
        return seconds * number / self._optimizer_parameters

    def _memory(
        self,
        mesh: Mesh,
        stages: Sequence[StageCosts],
        held: Sequence[HeldParameters],
        run: PipelineRun | None,
        number: int,
        received: int,
    ) -> tuple[MemoryParts, int]:
        """Return the parts of the rank with the highest peak, and which that is; `received` are a hand-over's bytes."""
        memory = []
        for rank in range(mesh.pipeline):
            own = _each(stages, rank, mesh)
            transient = max(stage.transient_bytes for stage in own)
            if run is None:
                saved = sum(stage.saved_bytes for stage in own)
                activations = round(saved * most_held(mesh, rank, number) / mesh.virtual_stages)
            else:
                activations = max(0, run.peak_bytes[rank] - transient)
            spec = self._request.training.optimizer
            activations += received * number * _num_received(mesh, rank)
            while_running = transient + self._workspaces
            memory.append(rank_memory(held[rank], mesh, self._model, spec, activations, while_running))
        fullest = max(range(mesh.pipeline), key=lambda r: memory[r].total)
        return memory[fullest], fullest

    def _makeup(
        self,
        parts: Sequence[Sequence[tuple[LayerCost, int]]],
        always: float,
        at_end: float,
        update: float,
        pipeline: float,
        step: float,
    ) -> Makeup:
        """Return the share of the step that each part takes; bubbles are shared out like work."""
        seconds_by_key: defaultdict[Component | None, float] = defaultdict(float)
        for part, count in (each for stage in parts for each in stage):
            for key, spent in part.makeup.items():
                seconds_by_key[key] += count * spent
        seconds_by_key[None] += always
        scale = pipeline / sum(seconds_by_key.values())
        shares = {key: scale * seconds / step for key, seconds in seconds_by_key.items()}
        shares[None] += at_end / step
        shares[self._optimizer] = update / step
        return shares


def _num_received(mesh: Mesh, rank: int) -> int:
    """Return how many buffers of hidden states a rank has for each micro-batch.

    `torch.distributed.pipelining` allocates one for each input and each gradient that a stage receives, for all
    micro-batches of a step.
    """
    stages = range(rank, mesh.num_stages, mesh.pipeline)
    return sum((stage > 0) + (stage < mesh.num_stages - 1) for stage in stages)


def reduces_late(mesh: Mesh) -> bool:
    """Return whether gradients are reduced over replicas after the last micro-batch, when no backward hides it.

    Whole models of pipelines do so, because torch's schedules reduce when all micro-batches are through. So do those of
    shared experts, unless they are sharded. Other replicas reduce while backward goes on. Tensor-parallel devices that
    have the same experts are replicas of these alone.
    """
    if mesh.data == mesh.expert_data == 1:
        return False
    return mesh.pipeline > 1 or (mesh.expert > 1 and mesh.sharding is Sharding.NONE)


def _each(of_stages: Sequence[T], rank: int, mesh: Mesh) -> Sequence[T]:
    """Return the entries of a rank's stages."""
    return of_stages[rank :: mesh.pipeline]
