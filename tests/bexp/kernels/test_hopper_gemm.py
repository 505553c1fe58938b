"""What of the Hopper grouped GEMM runs without a GPU: its tiles, and the reasons for which it does not serve."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bexp.kernels.experts.hopper_grouped import tiles as hopper
from bexp.kernels.experts.hopper_grouped.gemm import GemmProducts, differentiable_gemm
from bexp.kernels.experts.hopper_grouped.hopper_experts import HOPPER_GROUPED
from bexp.kernels.experts.hopper_grouped.tiles import HopperTiles, weights_tiles
from tests.bexp.kernels import gemm_cases
from tests.bexp.kernels.gemm_cases import GemmCase
from tests.bexp.kernels.references import relative_error
from tests.bexp.kernels.test_experts import experts_shape

NAMED = {name: value for name, value in vars(hopper).items() if isinstance(value, HopperTiles)}
THREADS = 128
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("num_experts", [1, 128, 512])
def test_tiles_fit_a_multiprocessor(name: str, num_experts: int) -> None:
    """A consumer that asks for registers that nobody gives back waits for ever."""
    tiles = NAMED[name]
    assert tiles.fits
    asked = tiles.consumers * tiles.consumer_registers(num_experts) + tiles.producer_registers(num_experts)
    assert asked <= tiles.launch_registers * (tiles.consumers + 1)
    assert tiles.launch_registers * (tiles.consumers + 1) * tiles.programs * THREADS <= 65536
    sums = tiles.rows * tiles.block_n // THREADS
    assert sums < tiles.consumer_registers(num_experts) <= 248
    assert tiles.block_n % tiles.columns == 0


def test_shared_memory_of_a_ring_and_its_way_out() -> None:
    tiles = HopperTiles(2, 64, 256, 64, stages=4, columns=128)
    assert tiles.block_m == 128
    assert 229376 < tiles.shared_bytes <= 227 * 1024
    assert not HopperTiles(2, 64, 256, 64, stages=4, columns=256).fits
    assert not HopperTiles(1, 64, 128, 64, stages=8, columns=128, programs=2).fits


@pytest.mark.parametrize(
    ("experts", "k", "n", "dynamic"),
    [
        (128, 2048, 1024, True),
        (8, 2048, 1024, True),
        (1, 4096, 4096, False),
        (600, 2048, 1024, False),
        (8, 256, 256, False),
    ],
    ids=["many experts", "few experts", "one expert", "experts beyond the order", "a tile each"],
)
def test_programs_take_tiles_when_they_are_free_if_experts_may_differ(
    experts: int, k: int, n: int, dynamic: bool
) -> None:
    assert weights_tiles(experts, k, n, 132).dynamic is dynamic


def test_reasons() -> None:
    def reason(dtype: torch.dtype, hidden: int = 256, width: int = 128) -> str | None:
        shape = experts_shape(hidden=hidden, width=width, experts=8, dtype=dtype)
        return HOPPER_GROUPED.unsupported_reason(shape, CPU)

    assert reason(torch.float32) == "hopper_grouped multiplies bfloat16 and float16, not float32"
    assert "multiples of 8, not 256 and 36" in (reason(torch.bfloat16, width=36) or "")
    assert reason(torch.bfloat16) == "Triton kernels need a CUDA device"


CASE = GemmCase("tails", (5, 20, 3), 24, 16)


def multiply_rows(x_RK: Tensor, w: Tensor, ends: Tensor, *, transposed: bool = False) -> Tensor:
    assert x_RK.is_contiguous() and w.is_contiguous(), "as kernels need them"
    rows = x_RK.tensor_split(ends.tolist()[:-1])
    return torch.cat([x @ (matrix.mT if transposed else matrix) for x, matrix in zip(rows, w, strict=True)])


def sum_over_rows(x_RK: Tensor, grad_RN: Tensor, ends: Tensor) -> Tensor:
    pairs = zip(*(rows.tensor_split(ends.tolist()[:-1]) for rows in (x_RK, grad_RN)), strict=True)
    return torch.stack([x.mT @ grad for x, grad in pairs])


def never(x_RK: Tensor, grad_RN: Tensor, ends: Tensor) -> Tensor:
    raise AssertionError("the matrices need no gradient")


multiply = differentiable_gemm(GemmProducts(multiply_rows, multiply_rows, sum_over_rows))


def test_matrices_are_read_as_they_lie_and_their_gradient_lies_the_same_way() -> None:
    x, w, grad = tensors = gemm_cases.inputs(CASE, torch.float64, CPU)
    ends = gemm_cases.ends_of(CASE.counts, CPU)
    for matrices in (w.clone(), w.mT.contiguous().mT):
        leaves = (x.detach().requires_grad_(), matrices.requires_grad_())
        out = multiply(*leaves, ends)
        found = (out.detach(), *torch.autograd.grad(out, leaves, grad))
        assert found[2].stride() == matrices.stride()
        for actual, wanted in zip(found, gemm_cases.expected(CASE, tensors), strict=True):
            assert relative_error(actual, wanted) <= 1e-12


def test_an_expanded_gradient_and_only_the_gradients_that_are_needed() -> None:
    x, w, _ = gemm_cases.inputs(CASE, torch.float64, CPU)
    ends = gemm_cases.ends_of(CASE.counts, CPU)
    x.requires_grad_()
    differentiable_gemm(GemmProducts(multiply_rows, multiply_rows, never))(x, w, ends).sum().backward()
    assert x.grad is not None
    experts = [expert for expert, count in enumerate(CASE.counts) for _ in range(count)]
    torch.testing.assert_close(x.grad, w.sum(-1)[experts])
