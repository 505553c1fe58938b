"""Norms of queries and keys whose heads are spread over ranks, against one norm over all heads."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bexp.workers.targets.reference.norm import EPSILON, norm_over_ranks, total_alone
from tests.bexp.kernels.references import relative_error
from tests.waits import PATIENCE_SECONDS

HEADS, GROUPS, WIDTH = 4, 2, 8


def drawn(dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys, their weights, and the gradients of both results."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 3, HEADS, WIDTH), (2, 3, GROUPS, WIDTH), (HEADS * WIDTH,), (GROUPS * WIDTH,)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in (*shapes, *shapes[:2])]


def outcome(norm: Callable[..., tuple[Tensor, Tensor]], tensors: list[Tensor]) -> list[Tensor]:
    inputs = [tensor.detach().clone().requires_grad_() for tensor in tensors[:4]]
    results = norm(*inputs)
    torch.autograd.backward(results, tensors[4:])
    return [*(each.detach() for each in results), *(each.grad for each in inputs if each.grad is not None)]


def whole(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, Tensor]:
    normed = [F.rms_norm(x.flatten(2), w.shape, w, EPSILON) for x, w in ((q, q_weight), (k, k_weight))]
    return normed[0].unflatten(-1, (-1, WIDTH)), normed[1].unflatten(-1, (-1, WIDTH))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=str)
def test_a_rank_that_has_all_heads_norms_as_one_device(dtype: torch.dtype, tolerance: float) -> None:
    tensors = drawn(dtype)
    found = outcome(lambda *inputs: norm_over_ranks(*inputs, size=1, total=total_alone), tensors)
    expected = outcome(whole, [tensor.double() for tensor in tensors])
    errors = [relative_error(one, other) for one, other in zip(found, expected, strict=True)]
    assert max(errors) <= tolerance, errors


def test_ranks_with_half_of_the_heads_have_half_of_the_result_each() -> None:
    tensors, size = drawn(torch.float32), 2
    barrier, given = threading.Barrier(size), [torch.empty(0)] * size
    found: list[list[Tensor]] = [[], []]

    def run(rank: int) -> None:
        def total(own: Tensor) -> Tensor:
            given[rank] = own
            barrier.wait(PATIENCE_SECONDS)
            summed = given[0] + given[1]
            barrier.wait(PATIENCE_SECONDS)
            return summed

        parts = [each.chunk(size, 0 if each.dim() == 1 else 2)[rank] for each in tensors]
        found[rank] = outcome(lambda *inputs: norm_over_ranks(*inputs, size=size, total=total), parts)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    joined = [torch.cat(both, 0 if both[0].dim() == 1 else 2) for both in zip(*found, strict=True)]
    expected = outcome(whole, [tensor.double() for tensor in tensors])
    errors = [relative_error(one, other) for one, other in zip(joined, expected, strict=True)]
    assert len(errors) == 6
    assert max(errors) <= 1e-6, errors
