"""A model in training on a mesh of ranks: tensor, pipeline and data parallelism."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.parallelism import Schedule
from bexp.explorer.dimensions.recompute import recomputed_layers
from bexp.explorer.meshes.mesh import MeshRun
from bexp.explorer.meshes.shards import spread_expert_model, tensor_shard
from bexp.explorer.model.model import ModelSpec
from bexp.explorer.model.training import Sharding
from bexp.explorer.request.request import ExplorationRequest
from bexp.kernels.expert_parallel.peers import GroupPeers
from bexp.measure.timestamps import Mark, mark_of
from bexp.workers.instruments.device_instruments import Instruments
from bexp.workers.instruments.failures import UnsupportedTrialError
from bexp.workers.instruments.kernel_shapes import torch_dtype
from bexp.workers.meshes.spread_experts import build_spread_experts
from bexp.workers.meshes.tensor_parallel import TensorParallel
from bexp.workers.targets.reference.block import ResidualBlock
from bexp.workers.targets.reference.decoder import (
    DecoderLayer,
    TakeUnit,
    layer_components,
    leave,
    share_rotary,
    share_routes,
)
from bexp.workers.targets.reference.factory import build_block, random_tokens
from bexp.workers.targets.reference.ffn_block import MoEFFN
from bexp.workers.targets.reference.head import Embedding, Head
from bexp.workers.targets.reference.weights import device_routes
from bexp.workers.training.data_parallel import DataParallel, SingleProcess, data_parallel, spread_parameters
from bexp.workers.training.optimizer import TrainingOptimizer


class MeshTrainingRun:
    """This rank's stages of a model, with their optimizer and the micro-batches of a step.

    Ranks are numbered as `bexp.explorer.meshes.transfers` says. Replicas have equal parameters and different data.
    Ranks that share blocks have one seed, so that their shards are alike and unsharded parameters equal.
    """

    graph_bytes = 0

    def __init__(
        self,
        instruments: Instruments,
        model: ModelSpec,
        candidate: Candidate,
        run: MeshRun,
        request: ExplorationRequest,
    ) -> None:
        """Build the stages. All ranks of the mesh must do this at the same time.

        Raises:
            UnsupportedTrialError: the model cannot be spread like this.
        """
        mesh, group = run.mesh, instruments.rank_group
        self._instruments = instruments
        self._mark = mark_of(instruments.device, alone=False)
        self._number = run.num_micro_batches
        self.rank = group.rank // (mesh.tensor * mesh.data)
        replica = group.rank // mesh.tensor % mesh.data
        together = group.strided(mesh.tensor, 1)
        self._tensor = None if together is None else TensorParallel(together, model)
        self._replicas = group.strided(mesh.data, mesh.tensor)
        self._pipeline = group.strided(mesh.pipeline, mesh.tensor * mesh.data)
        spread = None if mesh.expert == 1 else group.strided(mesh.expert, 1)
        self._expert_replicas = group.strided(mesh.expert_data, mesh.expert) if mesh.expert > 1 else None
        self._ends: dist.ProcessGroup | None = None
        if mesh.pipeline > 1 and model.tie_embeddings:
            self._ends = group.strided(2, (mesh.pipeline - 1) * mesh.tensor * mesh.data)
        training = request.training
        generator = instruments.generator(request.seed)
        gradient_dtype = torch_dtype(training.optimizer.gradient_dtype(model.dtype))
        by_itself = self._pipeline is None and spread is None
        self._reduces = self._replicas is not None and not by_itself and mesh.sharding is Sharding.NONE
        self._parallel: list[DataParallel] = []
        self.stages: list[DecoderStage] = []
        self._modules: list[nn.Module] = []
        build_experts: Callable[[Component], MoEFFN] | None = None
        if spread is not None:
            peers, device = GroupPeers(spread), instruments.device
            with_experts = spread_expert_model(model, mesh.tensor)

            def build_experts(component: Component) -> MoEFFN:
                sized = component.model_copy(update=mesh.expert_sizes)
                return build_spread_experts(peers, with_experts, sized, request, device, generator)

        cuts = list(pairwise(accumulate(run.layers_per_stage, initial=0)))
        assert len(cuts) == mesh.num_stages, "layers for each stage"
        for first, end in cuts[self.rank :: mesh.pipeline]:
            parallel: DataParallel = SingleProcess()
            if not self._reduces:
                parallel = data_parallel(
                    self._replicas, instruments.device, mesh.sharding, torch_dtype(model.dtype), gradient_dtype
                )
            stage = DecoderStage(
                model,
                candidate,
                request,
                instruments.device,
                first,
                end,
                generator=generator,
                ranks=self._tensor,
                experts=build_experts,
                take_unit=parallel.take,
            )
            self._parallel.append(parallel)
            self.stages.append(stage)
            self._modules.append(parallel.wrap(stage))
        parameters = [parameter for stage in self.stages for parameter in stage.parameters()]
        self.optimizer = TrainingOptimizer(parameters, training.optimizer, model.dtype)
        shape = (self._number * candidate.micro_batch_size, model.seq_length)
        drawn = instruments.generator(request.seed + 1 + replica)
        self.batch = tuple(random_tokens(model, shape, instruments.device, drawn) for _ in range(2))
        self.losses: list[Tensor] = []
        self._schedule: Any = None
        if self._pipeline is not None:
            self._schedule = self._plan(model, candidate, run)

    def begin(self) -> float:
        """Bring memory and communication to their steady state; return the seconds of a step."""
        if self._schedule is None:

            def micro_step() -> None:
                self._micro_step(0, is_last=True)

            self._parallel[0].prepare(self.optimizer, micro_step)
        seconds = 0.0
        for _ in range(2):  # the first opens connections and allocates gradients
            self._instruments.synchronize()
            started = time.perf_counter()
            self.step()
            self._instruments.synchronize()
            seconds = time.perf_counter() - started
        return seconds

    def step(self) -> list[Mark]:
        """Run a step; return the moments before it, before the optimizer, and after it."""
        marks = [self._mark()]
        self.compute_gradients()
        marks.append(self._mark())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [*marks, self._mark()]

    def compute_gradients(self) -> None:
        """Run forward and backward of all micro-batches, and exchange gradients; `losses` are then theirs."""
        self.losses = []
        if self._schedule is None:
            for number in range(self._number):
                self._micro_step(number, is_last=number == self._number - 1)
        else:
            self._run_schedule()
        gradients = {
            parameter: gradient
            for parameter, gradient in zip(self.optimizer.parameters, self.optimizer.gradients, strict=True)
            if gradient is not None
        }
        for stage in self.stages:
            if self._tensor is not None:
                self._tensor.sum_gradients(stage, gradients)
            if self._ends is not None and stage.tied is not None:
                dist.all_reduce(gradients[stage.tied], group=self._ends)
        self._average(gradients)

    def _average(self, gradients: dict[nn.Parameter, Tensor]) -> None:
        """Take the mean over the replicas, where backward has not done it.

        Gradients of spread experts are sums over the tokens of all ranks that share experts. Tensor-parallel ranks
        may have the same experts, for different tokens of one replica.
        """
        spread = {parameter for stage in self.stages for parameter in spread_parameters(stage)}
        left = [parameter for parameter in gradients if self._reduces or parameter in spread]
        for parameter in left:
            group = self._expert_replicas if parameter in spread else self._replicas
            if group is not None:
                dist.all_reduce(gradients[parameter], group=group)
        if left and self._replicas is not None:
            torch._foreach_div_([gradients[parameter] for parameter in left], float(self._replicas.size()))

    def finish(self) -> None:
        """Wait for the last step, and free memory that outlives the model."""
        self._instruments.synchronize()
        for parallel in self._parallel:
            parallel.finish()

    def _micro_step(self, number: int, *, is_last: bool) -> None:
        tokens, targets = (each.chunk(self._number)[number] for each in self.batch)
        context: AbstractContextManager[None] = self._parallel[0].micro_step(is_last=is_last)
        with context:
            loss = self._modules[0](tokens, targets)
            (loss.sum() / self._number).backward()
        self.losses.append(loss.detach())

    def _run_schedule(self) -> None:
        tokens, targets = self.batch
        inputs: Sequence[Tensor] = (tokens,) if self.stages[0].embedding is not None else ()
        if self.stages[-1].head is None:
            self._schedule.step(*inputs)
            return
        self._schedule.step(*inputs, targets_BS=targets, target=targets, losses=self.losses)
        self.losses = [self._number * loss.detach() for loss in self.losses]

    def _plan(self, model: ModelSpec, candidate: Candidate, run: MeshRun) -> Any:
        """Return torch's schedule of this rank's stages."""
        from torch.distributed.pipelining import (  # noqa: PLC0415 - takes half a second
            PipelineStage,
            Schedule1F1B,
            ScheduleInterleaved1F1B,
        )

        mesh, device = run.mesh, self._instruments.device
        if mesh.schedule not in {Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED}:
            raise UnsupportedTrialError(f"a whole model with schedule '{mesh.schedule}' is not run")
        m, length = candidate.micro_batch_size, model.seq_length
        tokens = torch.empty((m, length), dtype=torch.int64, device="meta")
        hidden_shape = (m, length // mesh.tensor, model.hidden_size)
        hidden = torch.empty(hidden_shape, dtype=torch_dtype(model.dtype), device="meta", requires_grad=True)
        loss = torch.empty(1, dtype=torch.float32, device="meta", requires_grad=True)
        stages = [
            PipelineStage(
                module,
                self.rank + i * mesh.pipeline,
                mesh.num_stages,
                device,
                input_args=(tokens if stage.embedding is not None else hidden,),
                output_args=(loss if stage.head is not None else hidden,),
                group=self._pipeline,
            )
            for i, (module, stage) in enumerate(zip(self._modules, self.stages, strict=True))
        ]

        def mean(output: Tensor, _: Tensor) -> Tensor:
            return output.sum() / self._number

        if mesh.schedule is Schedule.ONE_F_ONE_B:
            return Schedule1F1B(stages[0], self._number, mean, scale_grads=False)
        return ScheduleInterleaved1F1B(list(stages), self._number, mean, scale_grads=False)


class DecoderStage(nn.Module):
    """Layers `first` to `end` of `model` as a rank of a pipeline has them, with random weights.

    The first stage has the embedding and takes tokens. The last has the head and returns the loss as a tensor of one
    element. All others take and return hidden states.

    With one seed, `ranks` draw unsharded parameters alike. `experts` builds blocks whose experts are spread over ranks.
    `take_unit` is that of `DecoderModel`.
    """

    def __init__(
        self,
        model: ModelSpec,
        candidate: Candidate,
        request: ExplorationRequest,
        device: torch.device,
        first: int,
        end: int,
        *,
        generator: torch.Generator | None = None,
        ranks: TensorParallel | None = None,
        experts: Callable[[Component], MoEFFN] | None = None,
        take_unit: TakeUnit = leave,
    ) -> None:
        super().__init__()
        shard = tensor_shard(model, 1 if ranks is None else ranks.size)
        m = candidate.micro_batch_size

        def build(component: Component, w_tied: nn.Parameter | None = None) -> nn.Module:
            return build_block(shard, component, request, device, generator=generator, w_tied=w_tied)

        def end_of_model(kind: ComponentKind, w_tied: nn.Parameter | None = None) -> nn.Module:
            return build(Component(kind=kind, micro_batch_size=m), w_tied)

        self.embedding: nn.Module | None = None
        shares_ends = model.tie_embeddings and first == 0 and end == model.num_layers
        if first == 0:
            embedding = end_of_model(ComponentKind.EMBEDDING)
            assert isinstance(embedding, Embedding)
            w_tied = embedding.w_tokens if shares_ends else None
            self.embedding = embedding if ranks is None else ranks.embed(embedding)
            if not shares_ends:
                take_unit(self.embedding, is_last=False)
        else:
            w_tied = None
        attention, ffns = layer_components(candidate)
        recomputes = recomputed_layers(model, candidate.recompute)
        self.layers = nn.ModuleList()
        for i in range(first, end):
            block, component = build(attention), ffns[model.layer_kinds[i]]
            spreads = experts if component.kind is ComponentKind.MOE_FFN else None
            ffn = build(component) if spreads is None else spreads(component)
            assert isinstance(block, ResidualBlock)
            assert isinstance(ffn, ResidualBlock)
            if ranks is not None:
                ranks.spread(block)
                ranks.spread(ffn)
            layer = DecoderLayer(block, ffn, parallel=model.parallel_residual, recompute=recomputes[i])
            take_unit(layer, is_last=False)
            self.layers.append(layer)
        self.head: nn.Module | None = None
        if end == model.num_layers:
            head = end_of_model(ComponentKind.HEAD, w_tied)
            assert isinstance(head, Head)
            if ranks is not None:
                ranks.spread_loss(head)
            self.head = head
            if not shares_ends:
                take_unit(head, is_last=True)
        self._has_copy = model.tie_embeddings and not shares_ends
        self.train(request.mode == "train")
        share_rotary(self)
        if model.moe is not None:
            routes_TK = device_routes(model, request.routing, m * model.seq_length, request.seed, device)
            if ranks is not None and experts is not None:  # each rank routes its own tokens
                routes_TK = routes_TK.chunk(ranks.size)[ranks.rank]
            share_routes(self, routes_TK)

    @property
    def tied(self) -> nn.Parameter | None:
        """This stage's copy of a matrix that embedding and head share, if another stage has the other copy.

        The gradients of both copies must be summed. A stage that has embedding and head has a single matrix.
        """
        ends = [end for end in (self.embedding, self.head) if end is not None]
        if not self._has_copy or not ends:
            return None
        own = ends[0].w_tokens if self.head is None else ends[0].w_vocab
        assert isinstance(own, nn.Parameter)
        return own

    def forward(self, x: Tensor, targets_BS: Tensor | None = None) -> Tensor:
        """Map a micro-batch's tokens or hidden states to hidden states, or to the loss of `targets_BS`."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        if self.head is None:
            return x
        assert targets_BS is not None, "the last stage has targets"
        loss: Tensor = self.head(x, targets_BS)
        return torch.stack((loss,))  # fully_shard warns of views
