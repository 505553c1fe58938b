"""The target `bexp`: reference layers, built of a `ModelSpec`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bexp.explorer.cost.collectives import CommunicationUnits
from bexp.explorer.cost.components import BlockRecompute, Component, ComponentKind
from bexp.explorer.cost.text_batches import TextBatch
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.model.model import LayerKind, ModelSpec
from bexp.explorer.model.parts import ExploredModel
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.request.request import ExplorationRequest
from bexp.graphs.graphed_loss import GraphedLoss
from bexp.kernels.attention import attention_backend
from bexp.kernels.context_parallel.attention import ContextParallel, context_parallel_reason
from bexp.kernels.experts.registry import expert_backend
from bexp.measure.passes import ModulePasses
from bexp.measure.timestamps import Mark, mark_of
from bexp.workers.instruments.back_ends import report_device
from bexp.workers.instruments.device_instruments import Instruments
from bexp.workers.instruments.failures import UnsupportedTrialError
from bexp.workers.instruments.kernel_shapes import attention_shape, experts_shape, torch_dtype
from bexp.workers.targets.reference.block import ResidualBlock
from bexp.workers.targets.reference.decoder import DecoderModel
from bexp.workers.targets.reference.factory import build_block, example_inputs, random_tokens
from bexp.workers.targets.target import Miniature, OptimizerPart
from bexp.workers.training.data_parallel import DATA_PARALLEL_MICRO_STEPS, MICRO_STEPS, data_parallel, require_captured
from bexp.workers.training.optimizer import MuonOptimizer, TrainingOptimizer, build_optimizer


class BlockPasses(ModulePasses):
    """A block with its inputs, of which those in floating point are hidden states.

    The output of a residual block is shaped like its input, so that most such blocks can run in a row. Within the
    context of `waiting`, `meet_waiting` is called in place of `meet`.
    """

    def __init__(
        self,
        block: nn.Module,
        inputs: tuple[Tensor, ...],
        *,
        training: bool,
        gradient_dtype: torch.dtype,
        meet: Callable[[], None] | None = None,
        meet_waiting: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(
            block,
            tuple(x.detach().requires_grad_(x.is_floating_point()) for x in inputs),
            training=training,
            gradient_dtype=gradient_dtype,
            chained=0 if isinstance(block, ResidualBlock) and block.is_repeatable else None,
            meet=meet,
        )
        self._meet_waiting = meet_waiting

    def waiting(self) -> AbstractContextManager[None] | None:
        """Return the context in which the host waits as the block says; None if it never does."""
        block = self.module
        if not isinstance(block, ResidualBlock) or block.waiting is None:
            return None
        return self._run_waiting(block.waiting())

    @contextmanager
    def _run_waiting(self, waiting: AbstractContextManager[None]) -> Iterator[None]:
        alone, self._meet = self._meet, self._meet_waiting
        try:
            with waiting:
                yield
        finally:
            self._meet = alone

    @contextmanager
    def without_recomputation(self) -> Iterator[None]:
        """Run the block without recomputing it as a whole; its tiles and single operations are still recomputed."""
        block = self.module
        if not isinstance(block, ResidualBlock) or not block.recompute.is_whole:
            yield
            return
        asked, block.recompute = block.recompute, BlockRecompute.NONE
        try:
            yield
        finally:
            block.recompute = asked


NUM_LAYERS = 4
WIDTH, HEADS, TOKENS, WORDS = 64, 2, 16, 64
"""Sizes of the miniature. A head is 32 wide, so that rotary embeddings work."""


def miniature_of(model: ModelSpec) -> ModelSpec:
    """Return a small model of the same kind, with dense FFNs, because experts have as few parameter tensors."""
    sizes = {
        "num_layers": NUM_LAYERS,
        "hidden_size": WIDTH,
        "ffn_hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_query_groups": HEADS if model.query_groups == model.num_attention_heads else 1,
        "head_dim": WIDTH // HEADS,
        "rotary_fraction": 1.0,
        "vocab_size": WORDS,
        "seq_length": TOKENS,
        "max_position_embeddings": None,
        "moe": None,
    }
    return ModelSpec.model_validate(model.model_dump() | sizes)


class ReferenceTarget:
    """One job's reference layers, on the device of `instruments`."""

    def __init__(self, request: ExplorationRequest, instruments: Instruments) -> None:
        self._request = request
        self._instruments = instruments
        self._reasons: dict[tuple[ComponentKind, str, ModelSpec], str | None] = {}

    def report(self, hardware: HardwareSpec) -> DeviceReport:
        """Return which back ends can serve the request's model."""
        request, device = self._request, self._instruments.device
        space = request.space_on(device.type)
        chooses = len(space.executions) > 1 or space.replays
        named = request.expert_backends or ()
        return report_device(request.shapes, hardware, device, named_experts=named, chooses_execution=chooses)

    def rest(self) -> int:
        """Return 0, because nothing is kept between trials."""
        return 0

    def check(self, candidate: Candidate, model: ExploredModel) -> None:
        """Raise UnsupportedTrialError if a back end of the candidate cannot serve the model."""
        self._check_backend(ComponentKind.ATTENTION, candidate.attention_backend, _specified(model))
        if candidate.expert_backend is not None:
            self._check_backend(ComponentKind.MOE_FFN, candidate.expert_backend, _specified(model))

    @contextmanager
    def component(
        self,
        component: Component,
        model: ExploredModel,
        request: ExplorationRequest,
        batch: TextBatch | None = None,
    ) -> Iterator[BlockPasses]:
        """Build the block of a component with example inputs. Its sequences are full, so there is no `batch`."""
        spec = _specified(model)
        if (name := component.attention or component.experts) is not None:
            self._check_backend(component.kind, name, spec)
        instruments = self._instruments
        generator = instruments.generator(request.seed)
        size, layout = component.context_parallel_size, component.context_parallel_layout
        ring = find_ring(instruments, spec, size, layout, component.attention)
        ranks, sharing = instruments.rank_group, component.expert_parallel_size
        block = build_block(
            spec,
            component,
            request,
            instruments.device,
            generator=generator,
            context_parallel=ring,
            group=ranks.strided(sharing, 1) if ranks.size > 1 else None,
        )
        inputs = example_inputs(spec, component, instruments.device, generator)
        gradient_dtype = torch_dtype(request.training.optimizer.gradient_dtype(spec.dtype))
        barrier = ranks.barrier(component)
        yield BlockPasses(
            block,
            inputs,
            training=request.mode == "train",
            gradient_dtype=gradient_dtype,
            meet=barrier if component.communicates else None,
            meet_waiting=barrier,
        )

    def optimizer_parts(
        self, candidate: Candidate, model: ExploredModel, request: ExplorationRequest
    ) -> Iterator[OptimizerPart]:
        """Yield embedding with head, and one layer of each kind."""
        return optimizer_parts(self._instruments, _specified(model), candidate, request)

    @contextmanager
    def training_run(
        self, candidate: Candidate, model: ExploredModel, request: ExplorationRequest
    ) -> Iterator[ReferenceTrainingRun]:
        """Build the whole model, sharded and spread as the candidate says."""
        yield ReferenceTrainingRun(self._instruments, _specified(model), candidate, request)

    @contextmanager
    def miniature(self, model: ExploredModel, request: ExplorationRequest, *, together: bool) -> Iterator[Miniature]:
        """Build a small model whose FFNs are dense."""
        small = miniature_of(_specified(model))
        changed = request.model_copy(update={"model": small, "execution": Execution.EAGER, "executions": None})
        candidate = Candidate(micro_batch_size=1, attention_backend="math", num_query_groups=small.query_groups)
        run = ReferenceTrainingRun(self._instruments, small, candidate, changed, together=together)
        yield Miniature(run, CommunicationUnits.of(small).number)

    def _check_backend(self, kind: ComponentKind, name: str, model: ModelSpec) -> None:
        key = (kind, name, model)
        if key not in self._reasons:
            self._reasons[key] = self._unsupported_reason(kind, name, model)
        if (reason := self._reasons[key]) is not None:
            raise UnsupportedTrialError(reason)

    def _unsupported_reason(self, kind: ComponentKind, name: str, model: ModelSpec) -> str | None:
        device = self._instruments.device
        try:
            if kind is ComponentKind.ATTENTION:
                return attention_backend(name).unsupported_reason(attention_shape(model), device)
            shape = experts_shape(model)
            assert shape is not None, "the model has experts"
            return expert_backend(name).unsupported_reason(shape, device)
        except ValueError as error:
            return str(error)


def _specified(model: ExploredModel) -> ModelSpec:
    assert isinstance(model, ModelSpec), "reference layers are built of a specification"
    return model


@dataclass(frozen=True, slots=True)
class _SteppedTogether:
    """Components whose parameters are stepped together, and how often the model has them."""

    components: tuple[Component, ...]
    count: int

    @property
    def is_outer(self) -> bool:
        """Whether these are the embedding and the head, and no layer."""
        return self.components[0].kind is ComponentKind.EMBEDDING


def optimizer_parts(
    instruments: Instruments, model: ModelSpec, candidate: Candidate, request: ExplorationRequest
) -> Iterator[OptimizerPart]:
    """Yield embedding with head, and one layer of each kind, each with the request's optimizer."""
    for part in _parts(model, candidate):

        def build(part: _SteppedTogether = part) -> TrainingOptimizer | MuonOptimizer:
            parameters = _parameters(instruments, model, part, request)
            outer = [nn.ParameterList(parameters)] if part.is_outer else []
            optimizer = build_optimizer(parameters, request.training.optimizer, model.dtype, outer)
            if all(gradient is None for gradient in optimizer.gradients):
                for parameter in parameters:
                    parameter.grad = torch.zeros_like(parameter)
            return optimizer

        yield OptimizerPart(part.count, build)


def _parts(model: ModelSpec, candidate: Candidate) -> Iterator[_SteppedTogether]:
    def component(kind: ComponentKind, backend: str | None = None) -> Component:
        return Component(kind=kind, micro_batch_size=1, backend=backend)

    yield _SteppedTogether((component(ComponentKind.EMBEDDING), component(ComponentKind.HEAD)), 1)
    attention = component(ComponentKind.ATTENTION, candidate.attention_backend)
    ffns = {
        LayerKind.DENSE: component(ComponentKind.DENSE_FFN),
        LayerKind.MOE: component(ComponentKind.MOE_FFN, candidate.expert_backend),
    }
    for kind, ffn in ffns.items():
        if count := model.count_layers(kind):
            yield _SteppedTogether((attention, ffn), count)


def _parameters(
    instruments: Instruments, model: ModelSpec, part: _SteppedTogether, request: ExplorationRequest
) -> list[nn.Parameter]:
    """The parameters of the part's blocks, each once. A tied projection counts with the embedding.

    If training is sharded, the device has only its share of each parameter.
    """
    if request.devices.optimizer_shards == 1:
        return _build_parameters(instruments.device, instruments.generator(request.seed), model, part, request)
    generator = instruments.generator(request.seed)
    shapes = _build_parameters(torch.device("meta"), None, model, part, request)
    shares = [-(-parameter.numel() // request.devices.optimizer_shards) for parameter in shapes]
    dtype = torch_dtype(model.dtype)
    return [
        nn.Parameter(torch.empty(share, dtype=dtype, device=instruments.device).normal_(0.0, 0.02, generator=generator))
        for share in shares
    ]


def _build_parameters(
    device: torch.device,
    generator: torch.Generator | None,
    model: ModelSpec,
    part: _SteppedTogether,
    request: ExplorationRequest,
) -> list[nn.Parameter]:
    eager = request.model_copy(update={"execution": Execution.EAGER, "executions": None})  # no block is run
    parameters: dict[int, nn.Parameter] = {}
    tied: nn.Parameter | None = None
    for component in part.components:
        block = build_block(model, component, eager, device, generator=generator, w_tied=tied)
        if component.kind is ComponentKind.EMBEDDING and model.tie_embeddings:
            tied = next(p for p in block.parameters() if p.shape == (model.vocab_size, model.hidden_size))
        parameters |= {id(parameter): parameter for parameter in block.parameters()}
    return list(parameters.values())


class ReferenceTrainingRun:
    """A model with its optimizer and its micro-batches. Eval mode has no optimizer and no backward.

    The ranks of a group have the same parameters and train together, sharded or replicated as the request says. The
    ranks of a ring share the sequences of a micro-batch, and each ring has different sequences. If `together` is false,
    each rank trains a model alone and communicates nothing.
    """

    def __init__(
        self,
        instruments: Instruments,
        model: ModelSpec,
        candidate: Candidate,
        request: ExplorationRequest,
        *,
        together: bool = True,
    ) -> None:
        generator = instruments.generator(request.seed)
        self._instruments = instruments
        self._trains = request.mode == "train"
        self._mark = mark_of(instruments.device, alone=instruments.rank_group.size == 1)
        group, training = instruments.rank_group, request.training
        self.is_data_parallel = self._trains and group.size > 1 and together
        self._parallel = data_parallel(
            group.members if self.is_data_parallel else None,
            instruments.device,
            training.sharding,
            torch_dtype(model.dtype),
            torch_dtype(training.optimizer.gradient_dtype(model.dtype)),
        )
        size, layout = candidate.context_parallel_size, candidate.context_parallel_layout
        ring = find_ring(instruments, model, size, layout, candidate.attention_backend)
        decoder = DecoderModel(
            model,
            candidate,
            request,
            instruments.device,
            generator=generator,
            context_parallel=ring,
            take_unit=self._parallel.take,
        )
        self._model = self._parallel.wrap(decoder)
        self._graphed: GraphedLoss | None = None
        if self._trains and request.execution_of(candidate).replays:
            self._graphed = GraphedLoss(decoder, decoder.forward)
        self.optimizer: TrainingOptimizer | MuonOptimizer | None = None
        if self._trains:
            outer = [decoder.embedding, decoder.head]
            self.optimizer = build_optimizer(decoder.parameters(), training.optimizer, model.dtype, outer)
        shape = (candidate.micro_batch_size, model.seq_length)
        drawn = instruments.generator(request.seed + 1 + group.rank // size) if group.size > 1 else generator

        def tokens() -> Tensor:
            whole = random_tokens(model, shape, instruments.device, drawn)
            return whole if ring is None else ring.shard(whole)

        number = DATA_PARALLEL_MICRO_STEPS if self.is_data_parallel else MICRO_STEPS
        self._batches: list[tuple[Tensor, Tensor]] = [(tokens(), tokens()) for _ in range(number)]
        self.num_micro_steps = number

    @property
    def graph_bytes(self) -> int:
        """Bytes that CUDA graphs hold for their activations."""
        return 0 if self._graphed is None else self._graphed.held_bytes

    def begin(self) -> float:
        """Prepare, and run a step of one micro-step; return an estimate of a whole step in seconds."""
        seconds: list[float] = []

        def timed_micro_step() -> None:
            self._instruments.synchronize()
            started = time.perf_counter()
            self.micro_step(len(self._batches) - 1)
            self._instruments.synchronize()
            seconds.append(time.perf_counter() - started)

        if self._graphed is not None:
            self.micro_step(0)
            require_captured(self._graphed)
            if self.optimizer is not None:
                self.optimizer.zero_grad()
        if self.optimizer is not None:
            self._parallel.prepare(self.optimizer, timed_micro_step)  # may run micro-steps, and leave gradients
        if not seconds:
            timed_micro_step()
        self.update()
        return seconds[-1] * len(self._batches)

    def step(self) -> list[Mark]:
        """Run a step; return the moments before each micro-step, before the optimizer, and after it."""
        marks = [self._mark()]
        for i in range(len(self._batches)):
            self.micro_step(i)
            marks.append(self._mark())
        self.update()
        return [*marks, self._mark()]

    def finish(self) -> None:
        """Wait for the last step, and free memory that outlives the model."""
        self._instruments.synchronize()
        self._parallel.finish()

    def update(self) -> None:
        """Step the optimizer and set the gradients to zero."""
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def micro_step(self, number: int) -> None:
        """Run forward and backward of one micro-batch of a step."""
        tokens, targets = self._batches[number]
        with self._parallel.micro_step(is_last=number == len(self._batches) - 1):
            with torch.set_grad_enabled(self._trains):
                if self._graphed is not None:
                    loss = self._graphed(tokens_BS=tokens, targets_BS=targets)
                else:
                    loss = self._model(tokens, targets)
            if self._trains:
                (loss / len(self._batches)).backward()
            del loss


def find_ring(
    instruments: Instruments, model: ModelSpec, size: int, layout: str | None, backend: str | None
) -> ContextParallel | None:
    """The ring of this rank; None if there is no layout, because components without one need no other rank.

    Raises:
        UnsupportedTrialError: the sequences cannot be shared by so many, or not with this attention back end.
    """
    reason: str | None = None
    if model.seq_length % size:
        reason = f"{size} devices cannot share sequences of {model.seq_length} tokens equally"
    elif layout is not None:
        assert backend is not None, "attention has a back end"
        try:
            reason = context_parallel_reason(attention_shape(model), size, layout, backend, instruments.device)
        except ValueError as error:
            reason = str(error)
    if reason is not None:
        raise UnsupportedTrialError(reason)
    return None if layout is None else instruments.rank_group.context_parallel(size, layout)
