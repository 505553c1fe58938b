"""Recomputation by operation on a CUDA device: the same gradients, and the bytes that are predicted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bexp.explorer.cost.activation_memory import predict_component_bytes
from bexp.explorer.cost.components import BlockRecompute, Component, ComponentKind
from bexp.explorer.model.model import ModelSpec, MoESpec
from bexp.explorer.request.request import ExplorationRequest
from bexp.kernels.attention import attention_backend
from bexp.kernels.experts.registry import expert_backend
from bexp.measure.memory_meters import ActivationBytes, measure_memory
from bexp.workers.instruments.kernel_shapes import attention_shape, experts_shape
from bexp.workers.targets.reference.factory import build_block, example_inputs
from bexp.workers.targets.reference.target import BlockPasses
from tests.bexp.kernels.references import relative_error
from tests.gpu.needs import one_gpu
from tests.workers.targets.reference.models import outcome, shake

pytestmark = one_gpu()

CUDA = torch.device("cuda")
MICRO_BATCH = 4
BY_OPERATION = (BlockRecompute.ACTIVATIONS, BlockRecompute.PROJECTIONS)
ATTENTION = ("flash", "cudnn", "efficient", "math")
EXPERTS = ("grouped_mm", "loop", "bmm", "hopper_grouped", "fused")


def model(**fields: Any) -> ModelSpec:
    base: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": 512,
        "ffn_hidden_size": 1024,
        "num_attention_heads": 8,
        "vocab_size": 128,
        "seq_length": 1024,
        "dtype": "bfloat16",
        "moe": MoESpec(num_experts=8, top_k=2, expert_ffn_hidden_size=256),
    }
    return ModelSpec(**{**base, **fields})


@pytest.fixture(autouse=True)
def count_requested_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the bytes that tensors ask for.

    The caching allocator does not split a free block if at most 1 MiB of it would be left, and `memory_allocated` then
    counts the whole block. At these sizes that is a quarter of a tensor, and depends on what ran before.
    """

    def requested(kind: str) -> Callable[[torch.device], int]:
        return lambda device: int(torch.cuda.memory_stats(device)[f"requested_bytes.all.{kind}"])

    monkeypatch.setattr(torch.cuda, "memory_allocated", requested("current"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", requested("peak"))


def compare(spec: ModelSpec, kind: ComponentKind, backend: str | None) -> None:
    """Each choice against none: gradients within what a kernel differs from itself by, bytes as predicted."""
    request = ExplorationRequest(model=spec)
    expected: dict[str, torch.Tensor] = {}
    weights: dict[BlockRecompute, ActivationBytes] = {}
    for recompute in (BlockRecompute.NONE, *BY_OPERATION):
        component = Component(kind=kind, micro_batch_size=MICRO_BATCH, backend=backend, recompute=recompute)
        block = build_block(spec, component, request, CUDA)
        shake(block, torch.Generator(CUDA).manual_seed(0))
        with torch.no_grad():
            for parameter in block.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(0.2)
        (x,) = example_inputs(spec, component, CUDA, torch.Generator(CUDA).manual_seed(1))
        actual = outcome(block, block, x)
        for name, wanted in expected.items():
            assert relative_error(actual[name], wanted) <= 5e-3, (recompute, name)
        expected = expected or actual
        weights[recompute] = measure_memory(
            BlockPasses(block, (x,), training=True, gradient_dtype=torch.bfloat16), CUDA
        )
        predicted = predict_component_bytes(component, spec, request)
        output = x.nbytes
        assert predicted.saved == pytest.approx(weights[recompute].saved, rel=0.1, abs=0.2 * output), recompute
    saved = [weight.saved for weight in weights.values()]
    assert saved[0] > saved[1] >= saved[2]


@pytest.mark.parametrize("backend", ATTENTION)
@pytest.mark.parametrize(
    "fields", [{}, {"num_query_groups": 2}, {"num_query_groups": 2, "qk_norm": "head", "norm": "layernorm"}], ids=str
)
def test_attention(backend: str, fields: dict[str, Any]) -> None:
    spec = model(**fields)
    reason = attention_backend(backend).unsupported_reason(attention_shape(spec), CUDA)
    if reason is not None:
        pytest.skip(reason)
    compare(spec, ComponentKind.ATTENTION, backend)


@pytest.mark.parametrize("fields", [{}, {"gated_mlp": False, "activation": "gelu", "mlp_bias": True}], ids=str)
def test_dense_ffn(fields: dict[str, Any]) -> None:
    compare(model(**fields), ComponentKind.DENSE_FFN, None)


@pytest.mark.parametrize("backend", EXPERTS)
@pytest.mark.parametrize("moe", [{}, {"shared_expert_ffn_hidden_size": 256}], ids=str)
def test_experts(backend: str, moe: dict[str, Any]) -> None:
    spec = model(moe=MoESpec(num_experts=8, top_k=2, expert_ffn_hidden_size=256, **moe))
    shape = experts_shape(spec)
    assert shape is not None
    reason = expert_backend(backend).unsupported_reason(shape, CUDA)
    if reason is not None:
        pytest.skip(reason)
    compare(spec, ComponentKind.MOE_FFN, backend)


def test_a_retained_graph_runs_again_in_the_engines_own_thread() -> None:
    spec = model()
    component = Component(
        kind=ComponentKind.ATTENTION, micro_batch_size=2, backend="flash", recompute=BlockRecompute.PROJECTIONS
    )
    block = build_block(spec, component, ExplorationRequest(model=spec), CUDA)
    (x,) = example_inputs(spec, component, CUDA, training=True)
    out = block(x)
    (first,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(out.sum(), x)
    assert relative_error(first, second) <= 5e-3
