"""The parameters of a reference model, part by part, with the optimizer that steps them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.model.model import LayerKind, ModelSpec
from bexp.explorer.request.request import ExplorationRequest
from bexp.workers.instruments.device_instruments import Instruments
from bexp.workers.instruments.kernel_shapes import torch_dtype
from bexp.workers.targets.reference.factory import build_block
from bexp.workers.targets.target import OptimizerPart
from bexp.workers.training.optimizer import TrainingOptimizer, build_optimizer


@dataclass(frozen=True, slots=True)
class _SteppedTogether:
    """Components whose parameters are stepped together, and how often the model has them."""

    components: tuple[Component, ...]
    count: int


def optimizer_parts(
    instruments: Instruments, model: ModelSpec, candidate: Candidate, request: ExplorationRequest
) -> Iterator[OptimizerPart]:
    """Embedding with head, and one layer of each kind, each with the optimizer that the request asks for."""
    for part in _parts(model, candidate):

        def build(part: _SteppedTogether = part) -> TrainingOptimizer:
            parameters = _parameters(instruments, model, part, request)
            optimizer = build_optimizer(parameters, request.training.optimizer, model.dtype)
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
