"""The target `bexp`: reference layers, built of a `ModelSpec`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from bexp.explorer.cost.collectives import CommunicationUnits
from bexp.explorer.cost.components import BlockRecompute, Component, ComponentKind
from bexp.explorer.cost.text_batches import TextBatch
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.model.model import ModelSpec
from bexp.explorer.model.parts import ExploredModel
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.request.request import ExplorationRequest
from bexp.kernels.attention import attention_backend
from bexp.kernels.experts.registry import expert_backend
from bexp.measure.passes import ModulePasses
from bexp.workers.instruments.back_ends import report_device
from bexp.workers.instruments.device_instruments import Instruments
from bexp.workers.instruments.failures import UnsupportedTrialError
from bexp.workers.instruments.kernel_shapes import attention_shape, experts_shape, torch_dtype
from bexp.workers.instruments.ring import find_ring
from bexp.workers.targets.reference.block import ResidualBlock
from bexp.workers.targets.reference.factory import build_block, example_inputs
from bexp.workers.targets.reference.optimizer_parts import optimizer_parts
from bexp.workers.targets.reference.training_run import ReferenceTrainingRun
from bexp.workers.targets.target import Miniature, OptimizerPart


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
        """The context in which the host waits as the block says; None if it never does."""
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
        """The block without recomputation of the whole of it; its tiles and its single operations keep theirs."""
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
    """Return a small model of the same kind. Its FFNs are dense, because experts have as few parameter tensors."""
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
        return report_device(request.shapes, hardware, device, chooses_execution=chooses)

    def rest(self) -> int:
        """Nothing is kept between trials."""
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
            experts_group=ranks.strided(sharing, 1) if ranks.size > 1 else None,
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
        """Embedding with head, and one layer of each kind."""
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
