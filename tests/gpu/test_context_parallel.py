"""Context-parallel attention with the fused kernels, on one device that plays all ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bexp.kernels.context_parallel.blocks import block_attention
from bexp.kernels.context_parallel.layouts import LAYOUTS, context_parallel_layout
from bexp.kernels.context_parallel.ring import Ring
from bexp.kernels.context_parallel.ring_attention import RingAttention
from tests.bexp.kernels import references
from tests.bexp.kernels.context_parallel_ranks import attention
from tests.bexp.kernels.thread_ring import run_ranks
from tests.gpu.needs import one_gpu

pytestmark = [
    *one_gpu(),
    # The reference's backward begins with a product, in a thread of autograd's that has no context until then.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]

CUDA = torch.device("cuda")
NUM_RANKS, NUM_HEADS = 4, 8
TOLERANCE = 1e-2


def spread_attention(backend: str, layout: str, causal: bool, whole: list[Tensor], gradient: Tensor) -> list[Tensor]:
    """The output and the gradients of q, k and v (B, S, heads, D), from the parts of all ranks."""
    length, spread, scale = gradient.shape[1], context_parallel_layout(layout), gradient.shape[-1] ** -0.5
    positions = [spread.positions(length, NUM_RANKS, rank).to(CUDA) for rank in range(NUM_RANKS)]

    def run(ring: Ring) -> list[Tensor]:
        mine = positions[ring.rank]
        # As an attention block lays them out: views of one projection.
        sizes = [x.shape[2] for x in whole]
        q, k, v = (x.transpose(1, 2) for x in torch.cat([x[:, mine] for x in whole], dim=2).split(sizes, dim=2))
        steps = spread.steps(ring.rank, NUM_RANKS, len(mine), causal=causal)
        plan = RingAttention(ring, steps, block_attention(backend), scale)
        out, lse = plan.forward(q, k, v)
        grads = plan.backward(gradient[:, mine].transpose(1, 2), q, k, v, out, lse)
        return [x.transpose(1, 2) for x in (out, *grads)]

    parts = run_ranks(NUM_RANKS, run)
    order = torch.cat(positions).argsort()
    return [torch.cat(same, dim=1)[:, order] for same in zip(*parts, strict=True)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_groups", [8, 2, 1])
@pytest.mark.parametrize(("num_sequences", "head_size"), [(1, 64), (3, 128)])
@pytest.mark.parametrize("backend", ["flash", "cudnn"])
def test_output_and_gradients(
    backend: str, num_sequences: int, head_size: int, num_groups: int, layout: str, causal: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(num_sequences, 4 * 200, heads, head_size) for heads in (NUM_HEADS, num_groups, num_groups, NUM_HEADS)]
    *whole, gradient = (torch.randn(shape, generator=generator).to(CUDA, torch.bfloat16) for shape in shapes)
    inputs = references.leaves(whole)
    heads = [x.transpose(1, 2) for x in inputs]
    wanted = attention(heads[0], heads[1], heads[2], causal=causal, scale=None).transpose(1, 2)
    wanted.backward(gradient.double())
    found = spread_attention(backend, layout, causal, whole, gradient)
    for actual, expected in zip(found, (wanted, *(x.grad for x in inputs)), strict=True):
        assert actual.dtype == torch.bfloat16
        assert references.relative_error(actual, expected) <= TOLERANCE


def test_a_plan_of_another_layout_is_not_reused() -> None:
    """The output lies otherwise in the second call, where its queries have the strides that they had in the first."""
    generator = torch.Generator().manual_seed(0)
    block, scale = block_attention("cudnn"), 0.125
    projected = torch.randn(2, 256, 16, 64, generator=generator).to(CUDA, torch.float16)
    gradient = torch.randn(2, 256, 16, 64, generator=generator).to(CUDA, torch.float16).transpose(1, 2)
    q, k, v = (projected.transpose(1, 2)[:, :8] + shift for shift in (0, 0.5, 1))
    q = torch.empty_like(projected).transpose(1, 2)[:, :8].copy_(q)
    out, lse = block.forward(q, k, v, True, scale)
    wanted = block.backward(gradient[:, :8].clone(), q, k, v, out, lse, True, scale)
    gaps = torch.empty_like(projected).transpose(1, 2)[:, :8]
    found = block.backward(gradient[:, :8], q, k, v, gaps.copy_(out), lse, True, scale)
    for actual, expected in zip(found, wanted, strict=True):
        assert references.relative_error(actual, expected) <= 1e-3
