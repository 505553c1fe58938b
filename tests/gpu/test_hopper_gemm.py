"""The grouped GEMM for Hopper devices: every distribution, all tiles, and what one launch must not do to another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bexp.kernels.experts.hopper_grouped import gemm as hopper
from bexp.kernels.experts.hopper_grouped import tiles as hopper_tiles
from tests.bexp.kernels import gemm_cases
from tests.bexp.kernels.gemm_cases import GemmCase
from tests.bexp.kernels.references import relative_error
from tests.gpu.gemm_problems import CASES, CUDA, NAN, TOLERANCES, hopper_gemm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper device"
    ),
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:.*deterministic"),
]

ROWS_TILES = {
    "wide": hopper_tiles.WIDE,
    "wide, narrow pieces in turn": replace(hopper_tiles.WIDE, columns=64, buffers=2),
    "square": hopper_tiles.SQUARE,
    "low and wide": hopper_tiles.LOW_WIDE,
    "low": hopper_tiles.LOW,
    "low, two a multiprocessor": replace(hopper_tiles.LOW, stages=4, programs=2),
    "narrow": hopper_tiles.NARROW,
    "three consumers": hopper_tiles.HopperTiles(3, 64, 256, 64, stages=3, columns=128),
    "tall": hopper_tiles.HopperTiles(2, 128, 128, 64, stages=4, columns=64),
}
WEIGHTS_TILES = {
    "wide": hopper_tiles.WIDE,
    "long": hopper_tiles.LONG,
    "medium": hopper_tiles.MEDIUM,
    "square": hopper_tiles.SQUARE,
    "low, two a multiprocessor": hopper_tiles.HopperTiles(1, 64, 256, 32, stages=3, columns=128, buffers=2, programs=2),
    "three consumers": hopper_tiles.HopperTiles(3, 64, 256, 64, stages=3, columns=128),
}
WEIGHTS_TILES |= {
    f"{name}, heavy experts first": replace(WEIGHTS_TILES[name], dynamic=True)
    for name in ("wide", "long", "medium", "three consumers")
}
DYNAMIC = replace(hopper_tiles.WIDE, dynamic=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_hopper(case: GemmCase, dtype: torch.dtype) -> None:
    errors = gemm_cases.errors(hopper_gemm, case, dtype, CUDA)
    assert max(errors.values()) <= TOLERANCES[dtype], errors


@pytest.mark.parametrize("name", ROWS_TILES)
def test_all_rows_tiles(name: str) -> None:
    for case in (CASES[0], CASES[7], CASES[8], CASES[11], CASES[13]):
        x, w, grad = tensors = gemm_cases.inputs(case, torch.bfloat16, CUDA)
        ends = gemm_cases.ends_of(case.counts, CUDA)
        tiles = ROWS_TILES[name]
        actual = [
            hopper.multiply_rows(x, w, ends, out=torch.full_like(grad, NAN), tiles=tiles),
            hopper.multiply_rows(grad, w, ends, transposed=True, out=torch.full_like(x, NAN), tiles=tiles),
        ]
        for value, wanted in zip(actual, gemm_cases.expected(case, tensors)[:2], strict=True):
            assert relative_error(value, wanted) <= 1e-2, case.name


@pytest.mark.parametrize("name", WEIGHTS_TILES)
def test_all_weights_tiles(name: str) -> None:
    for case in (CASES[0], CASES[7], CASES[8], CASES[11], CASES[13]):
        x, _, grad = tensors = gemm_cases.inputs(case, torch.bfloat16, CUDA)
        out = torch.full_like(tensors[1], NAN)
        hopper.sum_over_rows(x, grad, gemm_cases.ends_of(case.counts, CUDA), out=out, tiles=WEIGHTS_TILES[name])
        assert relative_error(out, gemm_cases.expected(case, tensors)[2]) <= 1e-2, case.name


HEAVY = GemmCase("heavy experts behind light ones", (*(17 * 2 ** (i // 8) + i for i in range(64)), 0, 3), 512, 512)


def test_the_order_of_tiles_does_not_show_in_the_bits() -> None:
    x, _, grad = gemm_cases.inputs(HEAVY, torch.bfloat16, CUDA)
    ends = gemm_cases.ends_of(HEAVY.counts, CUDA)
    wanted = hopper.sum_over_rows(x, grad, ends, tiles=hopper_tiles.WIDE)
    for _ in range(10):
        assert torch.equal(hopper.sum_over_rows(x, grad, ends, tiles=DYNAMIC), wanted)


def test_streams_and_graphs_draw_their_tiles_apart() -> None:
    """A counter that two launches shared would leave tiles out, whose sums would stay NaN."""
    x, w, grad = gemm_cases.inputs(HEAVY, torch.bfloat16, CUDA)
    ends = gemm_cases.ends_of(HEAVY.counts, CUDA)
    wanted = hopper.sum_over_rows(x, grad, ends, tiles=DYNAMIC)
    streams = [torch.cuda.Stream() for _ in range(2)]
    outs = [[torch.full_like(w, NAN) for _ in range(8)] for _ in streams]
    captured = torch.full_like(w, NAN)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            hopper.sum_over_rows(x, grad, ends, out=captured, tiles=DYNAMIC)
    for first, second in zip(*outs, strict=True):
        with torch.cuda.stream(streams[0]):
            hopper.sum_over_rows(x, grad, ends, out=first, tiles=DYNAMIC)
        with torch.cuda.stream(streams[1]):
            hopper.sum_over_rows(x, grad, ends, out=second, tiles=DYNAMIC)
    torch.cuda.synchronize()
    assert all(torch.equal(out, wanted) for of_stream in outs for out in of_stream)
    for _ in range(2):
        captured.fill_(NAN)
        outs[1][0].fill_(NAN)
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[0]):
            graph.replay()
        with torch.cuda.stream(streams[1]):
            hopper.sum_over_rows(x, grad, ends, out=outs[1][0], tiles=DYNAMIC)
        torch.cuda.synchronize()
        assert torch.equal(captured, wanted)
        assert torch.equal(outs[1][0], wanted)


def test_an_expert_does_not_read_into_the_next() -> None:
    """What is not a number in one expert's rows stays out of the others' gradients and results."""
    case = GemmCase("infected", (70, 33, 200), 128, 256)
    x, w, grad = tensors = gemm_cases.inputs(case, torch.bfloat16, CUDA)
    ends = gemm_cases.ends_of(case.counts, CUDA)
    wanted_w = gemm_cases.expected(case, tensors)[2]
    x[70:103], grad[70:103] = NAN, NAN
    grad_w = hopper.sum_over_rows(x, grad, ends)
    out = hopper.multiply_rows(x, w, ends)
    for expert in (0, 2):
        assert relative_error(grad_w[expert], wanted_w[expert]) <= 1e-2
    assert out[70:103].isnan().all()
    assert not out[:70].isnan().any()
    assert not out[103:].isnan().any()


@pytest.mark.alone
def test_operands_of_more_than_two_to_the_31_numbers() -> None:
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB")
    torch.use_deterministic_algorithms(False)  # the poison of large tensors would take longer than the test
    x = torch.randn(1_100_005, 2048, device=CUDA, dtype=torch.bfloat16)
    w = torch.randn(3, 128, 2048, device=CUDA, dtype=torch.bfloat16) / 128**0.5
    ends = gemm_cases.ends_of((1_000_000, 0, 100_005), CUDA)
    out = hopper.multiply_rows(x[:, :128].contiguous(), w, ends)
    assert relative_error(out[-1000:], x[-1000:, :128].float() @ w[2].float()) <= 1e-2
    narrow = hopper.multiply_rows(x, w, ends, transposed=True)
    assert relative_error(narrow[-1000:], x[-1000:].float() @ w[2].float().T) <= 1e-2
    wanted = x[1_000_000:].float().T @ narrow[1_000_000:].float()
    assert relative_error(hopper.sum_over_rows(x, narrow, ends)[2], wanted) <= 1e-2
    wide = torch.randn(9, 16384, 16384, device=CUDA, dtype=torch.bfloat16)
    few = torch.randn(64, 16384, device=CUDA, dtype=torch.bfloat16)
    ends = gemm_cases.ends_of((30, *([0] * 7), 34), CUDA)
    assert relative_error(hopper.multiply_rows(few, wide, ends)[30:], few[30:].float() @ wide[8].float()) <= 1e-2
    grad_w = hopper.sum_over_rows(few, few, ends, out=wide)
    assert relative_error(grad_w[8], few[30:].float().T @ few[30:].float()) <= 1e-2
    assert (grad_w[7] == 0).all()
