"""Predicted bytes against weighed ones, block by block and policy by policy, and of sharded state."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from bexp.explorer.cost.activation_memory import predict_component_bytes
from bexp.explorer.cost.components import BlockRecompute, Component, ComponentKind
from bexp.explorer.cost.step import gathered_bytes, static_parts
from bexp.explorer.model.model import ModelSpec, MoESpec
from bexp.explorer.request.request import ExplorationRequest
from bexp.measure.memory_meters import ActivationBytes, measure_memory
from bexp.workers.targets.reference.factory import build_block, example_inputs
from bexp.workers.targets.reference.target import BlockPasses
from tests.forked_ranks import run_ranks
from tests.workers.profiler.sharded_memory_ranks import CASES, Case, name_of, request_of

CPU = torch.device("cpu")
PLAIN = (BlockRecompute.NONE, BlockRecompute.ACTIVATIONS, BlockRecompute.PROJECTIONS)
# LayerNorm, since torch's RMSNorm is one kernel on CUDA but several on the host, each keeping something.
SHAPE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 128,
    "ffn_hidden_size": 512,
    "num_attention_heads": 8,
    "vocab_size": 101,
    "seq_length": 128,
    "norm": "layernorm",
    "dtype": "float32",
}
MOE: dict[str, Any] = {"num_experts": 8, "top_k": 2, "expert_ffn_hidden_size": 128}


def check(
    model: ModelSpec, kind: ComponentKind, backend: str | None, recompute: BlockRecompute
) -> tuple[ActivationBytes, int]:
    """The weight, and the bytes of the block's output."""
    component = Component(kind=kind, micro_batch_size=4, backend=backend, recompute=recompute)
    request = ExplorationRequest(model=model)
    predicted = predict_component_bytes(component, model, request)
    block = build_block(model, component, request, CPU)
    passes = BlockPasses(block, example_inputs(model, component, CPU), training=True, gradient_dtype=torch.float32)
    weight = measure_memory(passes, CPU)
    output = 4 * model.seq_length * model.hidden_size * 4
    assert predicted.saved == pytest.approx(weight.saved, rel=0.02, abs=0.05 * output)
    # Of a peak, too little misleads (what does not fit is tried), and more than half too much does.
    assert 0.85 * weight.forward_peak <= predicted.forward_peak <= 1.5 * weight.forward_peak
    assert 0.85 * weight.backward_peak <= predicted.backward_peak <= 1.5 * weight.backward_peak
    return weight, output


@pytest.mark.parametrize("backend", ["flash", "math"])
@pytest.mark.parametrize("recompute", [*PLAIN, BlockRecompute.SELECTIVE])
def test_attention(backend: str, recompute: BlockRecompute) -> None:
    check(ModelSpec(**SHAPE), ComponentKind.ATTENTION, backend, recompute)


@pytest.mark.parametrize("fields", [{}, {"gated_mlp": False, "activation": "gelu"}], ids=str)
@pytest.mark.parametrize("recompute", PLAIN)
def test_dense_ffn(fields: dict[str, Any], recompute: BlockRecompute) -> None:
    check(ModelSpec(**{**SHAPE, **fields}), ComponentKind.DENSE_FFN, None, recompute)


@pytest.mark.parametrize("moe", [{}, {"shared_expert_ffn_hidden_size": 256, "shared_expert_gate": True}], ids=str)
@pytest.mark.parametrize("recompute", PLAIN)
def test_experts(moe: dict[str, Any], recompute: BlockRecompute) -> None:
    model = ModelSpec(**SHAPE, moe=MoESpec(**MOE, **moe))
    check(model, ComponentKind.MOE_FFN, "grouped_mm", recompute)


def test_what_each_choice_leaves_of_a_layer() -> None:
    """In hidden states a token: the projections leave attention's result, its sums, and the outputs of both blocks."""
    model = ModelSpec(**SHAPE)
    left = {}
    for recompute in PLAIN:
        weights = [check(model, kind, backend, recompute) for kind, backend in LAYER]
        left[recompute] = sum(weight.saved for weight, _ in weights) / weights[0][1]
    assert left[BlockRecompute.NONE] == pytest.approx(6 + 14, abs=0.2)
    assert left[BlockRecompute.ACTIVATIONS] == pytest.approx(5 + 9, abs=0.2)
    assert left[BlockRecompute.PROJECTIONS] == pytest.approx(2 + 1, abs=0.2)


LAYER = ((ComponentKind.ATTENTION, "flash"), (ComponentKind.DENSE_FFN, None))


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks("tests.workers.profiler.sharded_memory_ranks", folder)
    found: dict[str, int] = json.loads((folder / "peaks.json").read_text())
    return found


@pytest.mark.slow(together="forked")
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_state_is_counted_as_it_is_held(peaks: dict[str, int], case: Case) -> None:
    request = request_of(case)
    predicted = static_parts(request.shapes, request).total + gathered_bytes(request.shapes, request).at_layer
    assert predicted == pytest.approx(peaks[name_of(case)], rel=0.05)
