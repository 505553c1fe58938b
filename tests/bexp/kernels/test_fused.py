"""The fused experts on the host, in Triton's interpreter, which a child process is started with."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch

from bexp.kernels.experts.expert_backend import ExpertBackend
from bexp.kernels.experts.fused.fused_experts import FUSED
from bexp.kernels.experts.fused.hopper_tiles import GATE_UP_GEMM, GRAD_HIDDEN, HopperRows, HopperSum, HopperTile
from bexp.kernels.experts.fused.tiles import (
    HOPPER_EXPERTS,
    HOPPER_PRODUCT_ROWS,
    HOPPER_ROWS,
    FusedTiles,
    TileConfig,
    default_tiles,
)
from bexp.kernels.selective_recompute import selective_recompute
from tests.bexp.kernels import expert_cases, references
from tests.bexp.kernels.poison import poisoned_memory
from tests.bexp.kernels.test_experts import experts_shape
from tests.bexp.kernels.triton_interpreter import accept_scalars_of_one_element, is_interpreting, run_in_interpreter

CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(not is_interpreting(), reason="runs in the interpreter, which a child is started with")


def same_tiles(tile: TileConfig, **others: TileConfig) -> FusedTiles:
    return FusedTiles(**{**{field.name: tile for field in fields(FusedTiles)}, **others})


SMALL = TileConfig(16, 16, 16, 4, 2, group=2)
VARIANTS = {
    "pointers": same_tiles(SMALL),
    "few programs": same_tiles(TileConfig(16, 32, 16, 4, 2, group=3, per_multiprocessor=1)),
    "tensor maps": same_tiles(TileConfig(32, 16, 16, 4, 2, tma=True, parts=2), gate_up_gemm=SMALL),
    "copies": same_tiles(TileConfig(16, 16, 16, 4, 2, tma=True, copy=16, per_multiprocessor=1, parts=4)),
    "copies of several blocks": same_tiles(TileConfig(32, 16, 16, 4, 2, tma=True, copy=32), grad_w_out=SMALL),
}


def backend(tiles: FusedTiles) -> ExpertBackend:
    from bexp.kernels.experts.fused.function import fused_ffn

    return ExpertBackend("fused", False, lambda model, device: None, partial(fused_ffn, tiles=tiles))


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    if not is_interpreting():
        yield
        return
    accept_scalars_of_one_element()
    with poisoned_memory():
        yield


@pytest.mark.skipif(is_interpreting(), reason="this is the child")
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@interpreted
@pytest.mark.parametrize("case", expert_cases.CASES, ids=lambda case: case.name)
def test_output_and_gradients(case: expert_cases.ExpertCase) -> None:
    errors = expert_cases.errors(backend(VARIANTS["pointers"]), case, torch.float32, CPU)
    assert max(errors.values()) <= 1e-5, errors


@interpreted
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(
    "case",
    [
        expert_cases.ExpertCase("no multiple of a tile", 53, 5, 2, hidden=40, width=24, skew=1.0),
        expert_cases.ExpertCase("plain", 37, 4, 1, hidden=24, width=40, gated=False, activation="gelu"),
        expert_cases.ExpertCase("one takes all", 70, 3, 1, hidden=16, width=16, one_takes_all=True, activation="relu"),
    ],
    ids=lambda case: case.name,
)
def test_every_variant(name: str, case: expert_cases.ExpertCase) -> None:
    errors = expert_cases.errors(backend(VARIANTS[name]), case, torch.float32, CPU)
    assert max(errors.values()) <= 1e-5, errors


@interpreted
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("in_transposed", [True, False])
@pytest.mark.parametrize("out_transposed", [True, False])
def test_weights_are_read_as_they_lie_and_gradients_lie_the_same_way(
    name: str, in_transposed: bool, out_transposed: bool
) -> None:
    for case in (
        expert_cases.ExpertCase("no multiple of a tile", 53, 5, 2, hidden=40, width=24, skew=1.0),
        expert_cases.ExpertCase("plain", 37, 4, 1, hidden=24, width=40, gated=False, activation="gelu"),
    ):
        routes, (x, weights, w_in, w_out, grad) = expert_cases.problem(case, torch.float32, CPU)
        stored = map(expert_cases.transposed_storage, (w_in, w_out), (in_transposed, out_transposed))
        lying = [x, weights, *stored, grad]
        assert [t.is_contiguous() for t in lying[2:4]] == [not in_transposed, not out_transposed]
        found = expert_cases.run(backend(VARIANTS[name]), case, routes, lying)
        for actual, wanted in zip(found, expert_cases.expected(case, routes, lying), strict=True):
            assert references.relative_error(actual, wanted) <= 1e-5
        assert [g.stride() for g in found[3:]] == [w.stride() for w in lying[2:4]]


@interpreted
def test_half_precision() -> None:
    errors = expert_cases.errors(backend(VARIANTS["pointers"]), expert_cases.CASES[0], torch.float16, CPU)
    assert max(errors.values()) <= 2e-3, errors


def permuted(routes: torch.Tensor, num_experts: int, heights: tuple[int, ...]) -> tuple[Any, torch.Tensor]:
    """A permutation's parts and its buffer."""
    from bexp.kernels.experts.fused.token_permutation import TokenPermutation, permutation_size, permute_tokens
    from bexp.kernels.launcher import Launch, Launches

    sizes = (routes.numel(), num_experts)
    parts = TokenPermutation.of(*sizes, heights)
    buffer = torch.zeros(permutation_size(*sizes, heights), dtype=torch.int32)
    permute = permute_tokens(*sizes, routes.shape[1], parts)
    run = Launches(("routes", "permutation"), (permute,)) if isinstance(permute, Launch) else permute
    run(0, routes, buffer)
    return parts, buffer


@interpreted
@pytest.mark.parametrize("at_once", [True, False])
def test_rows_are_sorted_by_expert_and_then_by_token(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from bexp.kernels.experts.fused import token_permutation

    monkeypatch.setattr(token_permutation, "FEW_PAIRS", 900 if at_once else 0)
    routes = torch.tensor([[3, 0], [0, 2], [3, 2]] * 150)  # several blocks of pairs
    permutation, buffer = permuted(routes, 5, (16, 32))

    def part(pointer: Any, length: int) -> list[int]:
        found: list[int] = pointer.view({"permutation": buffer}, (length,)).tolist()
        return found

    experts, pairs = torch.sort(routes.flatten(), stable=True)
    assert part(permutation.pair_of_row, 900) == pairs.tolist()
    assert part(permutation.token_of_row, 900) == (pairs // 2).tolist()
    assert part(permutation.row_of_pair, 900) == pairs.argsort().tolist()
    assert (
        part(permutation.ends, 5)
        == torch.bincount(experts, minlength=5).cumsum(0).tolist()
        == [300, 300, 600, 900, 900]
    )
    assert part(permutation.largest_first, 5) == [0, 2, 3, 1, 4]
    for height, each in ((32, 10), (16, 19)):
        tiles = permutation.tiles[height]
        assert part(tiles.count, 1) == [3 * each]
        assert 3 * each <= tiles.most
        assert part(tiles.expert, 3 * each) == [0] * each + [2] * each + [3] * each
        assert part(tiles.row, 3 * each) == [s + height * i for s in (0, 300, 600) for i in range(each)]
        assert part(tiles.first, 5) == [0, each, each, 2 * each, 3 * each]


@interpreted
def test_it_keeps_a_row_of_pre_activations_and_three_integers_a_pair() -> None:
    case = expert_cases.ExpertCase("memory", 64, 4, 2)
    routes, tensors = expert_cases.problem(case, torch.float32, CPU)
    inputs = references.leaves(tensors[:4], torch.float32)
    own = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x, weights, w_in, w_out = inputs
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = backend(VARIANTS["pointers"]).forward(x, routes, weights, w_in, w_out, "silu")
    pairs = case.num_tokens * case.top_k
    for_tiles = 4 * (2 * (pairs // 16 + 4) + 3 * 4 + 1 + 9 * 3)  # each of nine parts aligned to four numbers
    assert sum(kept.values()) <= pairs * (2 * case.width * 4 + 3 * 4) + for_tiles
    out.sum().backward()


@interpreted
@pytest.mark.parametrize("name", ["pointers", "copies"])
def test_discarded_pre_activations_come_back_the_same(name: str) -> None:
    case = expert_cases.ExpertCase("discarded", 40, 4, 3, skew=1.0)
    routes, tensors = expert_cases.problem(case, torch.float32, CPU)
    plain = expert_cases.run(backend(VARIANTS[name]), case, routes, tensors)
    for products in (False, True):
        with selective_recompute(products=products):
            again = expert_cases.run(backend(VARIANTS[name]), case, routes, tensors)
        references.assert_same_values(again, plain)


@interpreted
def test_no_tokens() -> None:
    case = expert_cases.CASES[0]
    routes, (x, weights, w_in, w_out, _) = expert_cases.problem(case, torch.float32, CPU)
    run = backend(VARIANTS["pointers"]).forward
    assert run(x[:0], routes[:0], weights[:0], w_in, w_out, "silu").shape == (0, case.hidden)


@pytest.mark.parametrize("mean", [1, 20, 40, 100, 300, 5000])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("on_hopper", [True, False])
@pytest.mark.parametrize("top_k", [1, 2])
def test_default_tiles_agree_with_each_other(mean: int, gated: bool, on_hopper: bool, top_k: int) -> None:
    tiles = default_tiles(mean * 64 // top_k, top_k, 64, gated, 2, on_hopper)
    for field in fields(FusedTiles):
        tile = getattr(tiles, field.name)
        if not isinstance(tile, TileConfig):
            assert on_hopper
            assert mean >= HOPPER_ROWS or isinstance(tile, HopperSum)
            continue
        assert tile.tma or not tile.copy
        if tile.copy:
            wanted = tile.block_k if field.name.startswith("grad_w") else tile.block_m
            assert tile.copy % wanted == 0
    assert isinstance(tiles.gate_up_gemm, HopperTile) is (on_hopper and mean >= HOPPER_ROWS)
    assert isinstance(tiles.grad_w_in, HopperSum) is on_hopper
    by_expert = on_hopper and mean >= HOPPER_PRODUCT_ROWS
    assert isinstance(tiles.grad_input, HopperRows) is by_expert
    assert isinstance(tiles.down_gemm, HopperRows) is (by_expert and top_k > 1)
    many = default_tiles(mean * (HOPPER_EXPERTS + 1), top_k, HOPPER_EXPERTS + 1, gated, 2, on_hopper)
    assert all(isinstance(getattr(many, field.name), TileConfig) for field in fields(FusedTiles))


@pytest.mark.parametrize(
    "tile", [GATE_UP_GEMM, GRAD_HIDDEN, replace(GATE_UP_GEMM, gathered=False), replace(GATE_UP_GEMM, stages=4)]
)
def test_hopper_tiles_share_a_multiprocessor(tile: HopperTile) -> None:
    """A partition that asks for registers that nobody gives back waits for ever."""
    assert tile.fits is (tile.stages == 3)
    assert tile.launch_registers * 3 * 128 <= 65536
    assert 2 * tile.consumer_registers + tile.other_registers <= 3 * tile.launch_registers
    sums = tile.ROWS * tile.BLOCK_N // 128
    assert sums < tile.consumer_registers


@interpreted
def test_rows_are_gathered_in_the_experts_order() -> None:
    from bexp.kernels.experts.fused.layouts import Operand
    from bexp.kernels.experts.fused.token_permutation import gather_rows
    from bexp.kernels.launcher import Launches, Pointer

    routes = torch.tensor([[3, 0], [0, 2], [3, 2]] * 7)
    tokens, others = torch.randn(2, 21, 24)
    parts, buffer = permuted(routes, 5, (16,))
    order = parts.token_of_row.view({"permutation": buffer}, (42,)).long()
    places = [Operand(Pointer("out", start), 42, 24, "rows") for start in (0, 42 * 24 * 4)]
    for both in (False, True):
        out = torch.zeros(2, 42, 24)
        others_too = ("others", places[1]) if both else ()
        launch = gather_rows("tokens", places[0], parts, *others_too)
        Launches(("tokens", "others", "permutation", "out"), (launch,))(0, tokens, others, buffer, out)
        assert torch.equal(out[0], tokens[order])
        assert torch.equal(out[1], others[order] if both else torch.zeros(42, 24))


@pytest.mark.skipif(is_interpreting(), reason="asks for a device")
def test_it_says_why_it_does_not_run_on_the_host() -> None:
    assert FUSED.unsupported_reason(experts_shape(), CPU) == "the fused experts need a CUDA device, not cpu"


@pytest.mark.skipif(is_interpreting(), reason="asks for a device")
def test_it_names_the_rule_that_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert FUSED.unsupported_reason(experts_shape(), cuda) == "Triton is not installed"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert FUSED.unsupported_reason(experts_shape(), cuda) == "the fused experts need compute capability 9.0, not 8.6"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    single = experts_shape(dtype=torch.float32)
    assert FUSED.unsupported_reason(single, cuda) == "the fused experts take bfloat16 and float16, not float32"
    odd = FUSED.unsupported_reason(experts_shape(width=36), cuda)
    assert odd == "the fused experts need expert_ffn_hidden_size to be a multiple of 8, not 36"


@interpreted
def test_the_operators_agree_with_their_declarations() -> None:
    from bexp.kernels.experts.fused.operators import fused_experts

    case = expert_cases.CASES[0]
    routes, tensors = expert_cases.problem(case, torch.float32, CPU)
    x, weights, w_in, w_out = inputs = [tensor.requires_grad_() for tensor in tensors[:4]]
    arguments = (x, routes, weights, w_in, w_out, case.activation)
    for keep in (True, False):
        traced = ("test_autograd_registration", "test_aot_dispatch_dynamic") if keep else ()
        checks = ("test_schema", "test_faketensor", *traced)
        torch.library.opcheck(fused_experts, (*arguments, keep), test_utils=checks)
    out = fused_experts(*arguments, True)[0]
    expected = FUSED.forward(x, routes, weights, w_in, w_out, case.activation)
    found = [(result, *torch.autograd.grad(result, inputs, tensors[4])) for result in (out, expected)]
    references.assert_same_values(*found)
