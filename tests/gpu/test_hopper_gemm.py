"""The grouped GEMM for Hopper devices: every distribution, all tiles, and what one launch must not do to another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bexp.kernels.experts.hopper_grouped import gemm as hopper
from bexp.kernels.experts.hopper_grouped import tiles as hopper_tiles
from bexp.kernels.experts.registry import expert_backend
from tests.bexp.kernels import expert_cases, gemm_cases
from tests.bexp.kernels.gemm_cases import GemmCase
from tests.bexp.kernels.poison import poisoned_memory
from tests.bexp.kernels.references import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper device"
    ),
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:.*deterministic"),
]

CUDA = torch.device("cuda")
NAN = float("nan")


@pytest.fixture
def poisoned() -> Iterator[None]:
    with poisoned_memory(warn_only=True):
        yield


def zipf(num_rows: int, num_experts: int) -> tuple[int, ...]:
    share = 1 / torch.arange(1, num_experts + 1, dtype=torch.float64)
    return tuple((share / share.sum() * num_rows).long().tolist())


CASES = (
    *(case for case in gemm_cases.TINY),
    GemmCase("even", (256,) * 8, 256, 384),
    GemmCase("one more than a tile", (129, 65, 257, 1, 0, 127), 256, 384),
    GemmCase("skewed", zipf(5000, 64), 192, 320),
    GemmCase("mostly empty", (0,) * 100 + (300,) + (0,) * 100 + (5,), 128, 256),
    GemmCase("one takes all", (0, 0, 3001, 0), 512, 256),
    GemmCase("512 experts", tuple(i % 7 for i in range(512)), 128, 192),
    GemmCase("a single expert", (1000,), 384, 264),
    GemmCase("long sums", (1, 2000, 0, 700), 2048, 1024),
    GemmCase("the published uneven split, a 64th", (2043, 1233, 552, 1412, 22, 1882, 1009, 33), 512, 2048),
)

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


def hopper_gemm(x: Tensor, w: Tensor, counts: tuple[int, ...]) -> Tensor:
    return hopper.multiply(x, w, gemm_cases.ends_of(counts, CUDA))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_hopper(case: GemmCase, dtype: torch.dtype) -> None:
    errors = gemm_cases.errors(hopper_gemm, case, dtype, CUDA)
    assert max(errors.values()) <= 1e-2, errors


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


def test_another_stream_and_fresh_inputs() -> None:
    """Results do not depend on what ran before."""
    for seed in range(3):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            case = CASES[7]
            tensors = gemm_cases.inputs(case, torch.bfloat16, CUDA, seed)
            actual = gemm_cases.run(hopper_gemm, case, tensors)
            for value, wanted in zip(actual, gemm_cases.expected(case, tensors), strict=True):
                assert relative_error(value, wanted) <= 1e-2
        stream.synchronize()


@pytest.mark.parametrize("case", expert_cases.CASES, ids=lambda case: case.name)
def test_the_whole_ffn(case: expert_cases.ExpertCase) -> None:
    case = replace(case, width=128)
    errors = expert_cases.errors(expert_backend("hopper_grouped"), case, torch.bfloat16, CUDA)
    assert errors["out"] <= 1e-2, errors
    assert max(errors.values()) <= 2e-2, errors  # through several operations, each rounded to bfloat16


@pytest.mark.parametrize(("num_experts", "top_k"), [(64, 8), (512, 8), (8, 8), (1, 1)])
def test_the_back_end_agrees_with_the_loop(num_experts: int, top_k: int) -> None:
    case = expert_cases.ExpertCase("large", 2048, num_experts, top_k, hidden=512, width=256, skew=1.0)
    routes, tensors = expert_cases.problem(case, torch.bfloat16, CUDA)
    wanted = expert_cases.run(expert_backend("loop"), case, routes, tensors)
    backend = expert_backend("hopper_grouped")
    first, second = (expert_cases.run(backend, case, routes, tensors) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for value, expected in zip(first, wanted, strict=True):
        assert relative_error(value, expected) <= 1e-2


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_it_never_waits_for_the_device() -> None:
    case = CASES[7]
    x, w, grad = gemm_cases.inputs(case, torch.bfloat16, CUDA)
    ends = gemm_cases.ends_of(case.counts, CUDA)
    x.requires_grad_()
    w.requires_grad_()
    hopper.multiply(x, w, ends).backward(grad)
    torch.cuda.set_sync_debug_mode("error")
    try:
        hopper.multiply(x, w, ends).backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


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
