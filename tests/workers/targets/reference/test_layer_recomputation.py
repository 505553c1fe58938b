"""What composes of measured blocks for policies with a number, against the whole model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bexp.explorer.cost.components import BlockRecompute, ComponentKind
from bexp.explorer.cost.composition import Composition
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.request.request import ExplorationRequest
from bexp.measure.memory_meters import byte_meter, measure_memory
from bexp.workers.targets.reference.decoder import DecoderModel
from bexp.workers.targets.reference.factory import build_block, example_inputs, random_tokens
from bexp.workers.targets.reference.target import BlockPasses
from tests.workers.targets.reference.models import CPU, small_model, small_moe

BATCH = 4
SHAPE: dict[str, Any] = {"num_layers": 7, "seq_length": 64, "vocab_size": 64}


class _Products(TorchDispatchMode):
    """Counts matrix products that run, the backward pass included."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def composed_peak(candidate: Candidate, request: ExplorationRequest) -> float:
    table = Composition([candidate], request.shapes, request)
    sizes = np.zeros((3, len(table.components)))
    for i, component in enumerate(table.components):
        if component.kind is ComponentKind.OPTIMIZER:
            continue
        block = build_block(request.shapes, component, request, CPU)
        inputs = example_inputs(request.shapes, component, CPU)
        found = measure_memory(BlockPasses(block, inputs, training=True, gradient_dtype=torch.float32), CPU)
        sizes[:, i] = found.saved, found.forward_peak, found.backward_peak
    saved_C, transient_C = table.activation_bytes(*sizes)
    return float(saved_C[0] + transient_C[0])


def whole_peak(candidate: Candidate, request: ExplorationRequest) -> int:
    model = request.shapes
    decoder = DecoderModel(model, candidate, request, CPU)
    tokens, targets = (random_tokens(model, (BATCH, model.seq_length), CPU, None) for _ in range(2))
    for parameter in decoder.parameters():
        parameter.grad = torch.zeros_like(parameter)
    existing = [*decoder.parameters(), *(p.grad for p in decoder.parameters()), *decoder.buffers(), tokens, targets]
    with byte_meter(CPU, [tensor for tensor in existing if tensor is not None]) as meter:
        meter.reset_peak()
        base = meter.level()
        decoder(tokens, targets).backward()
        return meter.peak() - base


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, ("none", "layers_3", "full", "groups_3", "groups_7")),
        ({"moe": small_moe(first_k_dense=2)}, ("none", "layers_3", "groups_3", "groups_7")),
    ],
    ids=["dense", "experts"],
)
def test_the_composed_peak_is_that_of_the_whole_model(fields: dict[str, Any], names: tuple[str, ...]) -> None:
    request = ExplorationRequest(model=small_model(**SHAPE, **fields), batch_size=8)
    peaks = {}
    for name in names:
        candidate = Candidate(
            micro_batch_size=BATCH,
            recompute=Recompute(name),
            attention_backend="flash",
            expert_backend="loop" if fields else None,
            num_query_groups=request.shapes.query_groups,
        )
        peaks[name] = (composed_peak(candidate, request), whole_peak(candidate, request))
    assert {name: composed for name, (composed, _) in peaks.items()} == {
        name: whole for name, (_, whole) in peaks.items()
    }
    assert peaks.get("full", (0, 0))[1] < peaks["groups_3"][1] < peaks["groups_7"][1]
    assert peaks["layers_3"][1] < peaks["none"][1]


def test_a_block_of_a_group_runs_again_to_its_end() -> None:
    """A layer by itself leaves out its last product, which a later layer of the same group needs."""
    model = small_model()
    request = ExplorationRequest(model=model)
    calls = {}
    for recompute in (BlockRecompute.FULL, BlockRecompute.TO_THE_END):
        candidate = Candidate(
            micro_batch_size=BATCH,
            recompute=Recompute.FULL if recompute is BlockRecompute.FULL else Recompute("groups_2"),
            attention_backend="flash",
            num_query_groups=model.query_groups,
        )
        (component,) = (
            c for c in Composition([candidate], model, request).components if c.kind is ComponentKind.DENSE_FFN
        )
        assert component.recompute is recompute
        block = build_block(model, component, request, CPU)
        x = example_inputs(model, component, CPU, training=True)[0]
        with _Products() as products:  # type: ignore[no-untyped-call]  # untyped in torch
            block(x).sum().backward()
        calls[recompute] = products.count
    assert calls[BlockRecompute.TO_THE_END] == calls[BlockRecompute.FULL] + 1
