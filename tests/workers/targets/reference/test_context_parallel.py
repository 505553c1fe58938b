"""Models whose sequences are spread over ranks: the loss and the gradients of the model that has them whole."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.cost.decomposition import Decomposer
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.model import ModelSpec
from bexp.explorer.request.request import ExplorationRequest
from bexp.kernels.context_parallel.attention import ContextParallel
from bexp.kernels.context_parallel.layouts import LAYOUTS, context_parallel_layout
from bexp.kernels.context_parallel.ring import Ring
from bexp.workers.targets.reference.decoder import DecoderModel
from bexp.workers.targets.reference.factory import build_block, example_inputs
from tests.bexp.kernels.thread_ring import run_ranks
from tests.workers.profiler.samples import MODEL, candidate

CPU = torch.device("cpu")
DENSE = ModelSpec.model_validate(MODEL.model_dump() | {"moe": None, "seq_length": 32})
LEARNED = ModelSpec.model_validate(DENSE.model_dump() | {"position": "learned"})


class ThreadedContextParallel(ContextParallel):
    """A rank that is a thread."""

    def __init__(self, ring: Ring, layout: str) -> None:
        self.layout = context_parallel_layout(layout)
        self._ring = ring


def loss_and_gradients(model: DecoderModel, tokens: Tensor, targets: Tensor) -> list[Tensor]:
    loss = model(tokens, targets)
    torch.autograd.backward(loss)
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    ("spec", "layout", "size", "recompute", "bta_tile"),
    [
        *((DENSE, layout, 2, Recompute.NONE, None) for layout in LAYOUTS),
        (DENSE, "zigzag", 4, Recompute.NONE, 1),
        (DENSE, "striped", 2, Recompute.SELECTIVE, None),
        (DENSE, "striped", 2, Recompute.QKV, None),
        (DENSE, "zigzag", 2, Recompute.FULL, None),
        (LEARNED, "striped", 2, Recompute.NONE, None),
    ],
)
def test_ranks_make_the_whole(
    spec: ModelSpec, layout: str, size: int, recompute: Recompute, bta_tile: int | None
) -> None:
    plain = candidate(2, experts=None, bta_tile=bta_tile, recompute=recompute)
    spread = plain.model_copy(update={"context_parallel_size": size, "context_parallel_layout": layout})
    request = ExplorationRequest(model=spec)
    tokens, targets = (torch.randint(spec.vocab_size, (2, spec.seq_length)) for _ in range(2))
    whole = DecoderModel(spec, plain, request, CPU, generator=torch.Generator().manual_seed(0))
    expected = loss_and_gradients(whole, tokens, targets)
    state = copy.deepcopy(whole.state_dict())

    def run(ring: Ring) -> list[Tensor]:
        context = ThreadedContextParallel(ring, layout)
        model = DecoderModel(spec, spread, request, CPU, context_parallel=context)
        model.load_state_dict(state)
        return loss_and_gradients(model, context.shard(tokens), context.shard(targets))

    for found, wanted in zip(zip(*run_ranks(size, run), strict=True), expected, strict=True):
        torch.testing.assert_close(torch.stack(found).mean(0), wanted, rtol=1e-3, atol=1e-6)


def test_every_component_but_the_optimizer_has_its_share_of_the_tokens() -> None:
    spread = candidate(1, layout="ring", size=4)  # more sequences are shared out by whole ones
    shares = {c.kind: c.context_parallel_size for c in Decomposer(MODEL, training=True)(spread).components}
    elsewhere = {ComponentKind.COMMUNICATION, ComponentKind.EXCHANGE, ComponentKind.SHELL, ComponentKind.LAYER}
    kinds = set(ComponentKind) - elsewhere
    assert shares == {kind: 1 if kind is ComponentKind.OPTIMIZER else 4 for kind in kinds}
    for kind in (ComponentKind.EMBEDDING, ComponentKind.MOE_FFN, ComponentKind.HEAD):
        backend = "grouped_mm" if kind is ComponentKind.MOE_FFN else None
        component = Component(kind=kind, micro_batch_size=2, backend=backend, context_parallel_size=4)
        inputs = example_inputs(MODEL, component, CPU)
        assert inputs[0].shape[:2] == (2, MODEL.seq_length // 4)
        build_block(MODEL, component, ExplorationRequest(model=MODEL), CPU)(*inputs)
    odd = Component(kind=ComponentKind.HEAD, micro_batch_size=2, context_parallel_size=3)
    with pytest.raises(ValueError, match="share 64 tokens"):
        example_inputs(MODEL, odd, CPU)
