"""The Hopper kernels on tensors: forward and both gradients of a grouped GEMM, with the experts' bounds on the device.

The kernels are compiled by Triton's Gluon and imported when first used: not every machine has it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from bexp.kernels.allocation import checked, empty
from bexp.kernels.autograd import applied, differentiable_once
from bexp.kernels.experts.hopper_grouped.counter import tile_counter
from bexp.kernels.experts.hopper_grouped.launch import (
    WARPS_OF_A_GROUP,
    most_row_tiles,
    searched_experts,
    tensor_map,
)
from bexp.kernels.experts.hopper_grouped.tiles import MOST_ORDERED_EXPERTS, HopperTiles, rows_tiles, weights_tiles
from bexp.kernels.experts.matrices import stored
from bexp.kernels.experts.rows import Rows
from bexp.kernels.launcher import ALIGNMENT_BYTES, KEPT_LAUNCHES, Launch, Launches, Pointer, current_stream, is_current
from bexp.kernels.triton_support import aligned, num_multiprocessors


def multiply_rows(
    x_RK: Tensor,
    w: Tensor,
    ends: Tensor,
    *,
    transposed: bool = False,
    out: Tensor | None = None,
    tiles: HopperTiles | None = None,
) -> Tensor:
    """Each expert's rows by its matrix: (R, K) and (E, K, N), or (E, N, K) where `transposed`, to (R, N).

    `ends` (E,) int32 are the experts' last rows plus one, ascending to R. K and N are multiples of `ALIGNMENT`. `out`
    is contiguous.
    """
    device = x_RK.get_device()
    if not is_current(device):
        with torch.cuda.device(device):
            return multiply_rows(x_RK, w, ends, transposed=transposed, out=out, tiles=tiles)
    if not _are_aligned(x_RK, w):
        x_RK, w = aligned(x_RK), aligned(w)
    shape, strides, launch = _multiply_rows(
        x_RK.shape, w.shape, x_RK.dtype, w.dtype, ends.dtype, transposed, tiles, device
    )
    out = empty(x_RK, shape, strides, x_RK.dtype) if out is None else checked(out, x_RK, shape)
    if launch is not None:
        launch(current_stream(device), x_RK, w, out, ends)
    return out


def sum_over_rows(
    x_RK: Tensor, grad_RN: Tensor, ends: Tensor, *, out: Tensor | None = None, tiles: HopperTiles | None = None
) -> Tensor:
    """Each expert's x^T grad over its rows: (R, K) and (R, N) to (E, K, N); zero for an expert without rows.

    `out` is contiguous.
    """
    device = x_RK.get_device()
    if not is_current(device):
        with torch.cuda.device(device):
            return sum_over_rows(x_RK, grad_RN, ends, out=out, tiles=tiles)
    if not _are_aligned(x_RK, grad_RN):
        x_RK, grad_RN = aligned(x_RK), aligned(grad_RN)
    shape, strides, launch, claims = _sum_over_rows(
        x_RK.shape, grad_RN.shape, ends.shape, x_RK.dtype, grad_RN.dtype, ends.dtype, tiles, device
    )
    out = empty(x_RK, shape, strides, x_RK.dtype) if out is None else checked(out, x_RK, shape)
    if launch is None:
        return out.zero_()
    stream = current_stream(device)
    if claims:
        launch(stream, x_RK, grad_RN, out, ends, tile_counter(device, stream))
    else:
        launch(stream, x_RK, grad_RN, out, ends)
    return out


def _are_aligned(a: Tensor, b: Tensor) -> bool:
    return a.is_contiguous() and b.is_contiguous() and (a.data_ptr() | b.data_ptr()) % ALIGNMENT_BYTES == 0


@lru_cache(KEPT_LAUNCHES)
def _multiply_rows(
    x_shape: tuple[int, int],
    w_shape: tuple[int, int, int],
    dtype: torch.dtype,
    w_dtype: torch.dtype,
    ends_dtype: torch.dtype,
    transposed: bool,
    tiles: HopperTiles | None,
    device: int,
) -> tuple[tuple[int, int], tuple[int, int], Launches | None]:
    """The shape and strides of the result, and the launch; None if there is nothing to write."""
    num_rows, k = x_shape
    num_experts, n = w_shape[0], w_shape[1] if transposed else w_shape[2]
    assert w_shape[2 if transposed else 1] == k, "x (R, K) and w (E, K, N), or (E, N, K) if transposed"
    if num_rows == 0 or n == 0:
        return (num_rows, n), (n, 1), None
    pointers = (Pointer("x"), Pointer("w"), Pointer("out"), Pointer("ends"))
    launch = rows_launch(*pointers, num_rows, num_experts, k, n, transposed, dtype, device, tiles)
    return (num_rows, n), (n, 1), Launches(("x", "w", "out", "ends"), (launch,))


def rows_launch(
    x: Pointer,
    w: Pointer,
    out: Pointer,
    ends: Pointer,
    num_rows: int,
    num_experts: int,
    k: int,
    n: int,
    transposed: bool,
    dtype: torch.dtype,
    device: int,
    tiles: HopperTiles | None = None,
    places: Pointer | None = None,
) -> Launch:
    """The launch of `multiply_rows`; with `places` (R,) int32, row i of the result is written to row places[i]."""
    from bexp.kernels.experts.hopper_grouped.rows_kernel import rows_kernel  # noqa: PLC0415 - imports Triton

    multiprocessors = num_multiprocessors(torch.device("cuda", device))
    tiles = tiles or rows_tiles(num_rows, num_experts, k, n, multiprocessors)
    row_tiles = most_row_tiles(num_rows, num_experts, tiles.block_m)
    w_shape, w_block = (num_experts, k, n), (1, tiles.block_k, tiles.block_n)
    if transposed:
        w_shape, w_block = (num_experts, n, k), (1, tiles.block_n, tiles.block_k)
    return Launch(
        rows_kernel,
        (min(row_tiles * -(-n // tiles.block_n), tiles.programs * multiprocessors),),
        {
            "x_desc": tensor_map(x, (num_rows, k), (tiles.rows, tiles.block_k), dtype),
            "w_desc": tensor_map(w, w_shape, w_block, dtype),
            "out_desc": tensor_map(out, (num_rows, n), (tiles.rows, tiles.columns), dtype),
            "out": out,
            "places": ends if places is None else places,
            "ends": ends,
            "num_experts": num_experts,
            "K": k,
            "N": n,
            "stride_out": n,
            "EXPERTS": searched_experts(num_experts),
            "TRANSPOSED": transposed,
            "SCATTERED": places is not None,
            "BLOCK_K": tiles.block_k,
            **_sizes(tiles, num_experts),
        },
        **_options(tiles),
    )


@lru_cache(KEPT_LAUNCHES)
def _sum_over_rows(
    x_shape: tuple[int, int],
    grad_shape: tuple[int, int],
    ends_shape: tuple[int],
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    ends_dtype: torch.dtype,
    tiles: HopperTiles | None,
    device: int,
) -> tuple[tuple[int, int, int], tuple[int, int, int], Launches | None, bool]:
    """The shape and strides of the result, the launch, None without rows, and whether it takes a counter of tiles."""
    (num_rows, k), n, num_experts = x_shape, grad_shape[1], ends_shape[0]
    shape, strides = (num_experts, k, n), (k * n, n, 1)
    if num_rows == 0:
        return shape, strides, None, False
    pointers = (Pointer("x"), Pointer("grad"), Pointer("out"), Pointer("ends"))
    launch, claims = weights_launch(*pointers, num_rows, num_experts, k, n, dtype, device, tiles)
    names = ("x", "grad", "out", "ends", *(("counter",) if claims else ()))
    return shape, strides, Launches(names, (launch,)), claims


def weights_launch(
    x: Pointer,
    grad: Pointer,
    out: Pointer,
    ends: Pointer,
    num_rows: int,
    num_experts: int,
    k: int,
    n: int,
    dtype: torch.dtype,
    device: int,
    tiles: HopperTiles | None = None,
) -> tuple[Launch, bool]:
    """The launch of `sum_over_rows`, and whether it also takes a `tile_counter`, which is called "counter"."""
    from bexp.kernels.experts.hopper_grouped.weights_kernel import weights_kernel  # noqa: PLC0415 - imports Triton

    multiprocessors = num_multiprocessors(torch.device("cuda", device))
    tiles = tiles or weights_tiles(num_experts, k, n, multiprocessors)
    claims = tiles.dynamic
    assert num_experts <= MOST_ORDERED_EXPERTS or not claims, f"{num_experts} experts are taken in their order"
    num_tiles = num_experts * -(-k // tiles.block_m) * -(-n // tiles.block_n)
    launch = Launch(
        weights_kernel,
        (min(num_tiles, tiles.programs * multiprocessors),),
        {
            "x_desc": tensor_map(x, (num_rows, k), (tiles.block_k, tiles.rows), dtype),
            "grad_desc": tensor_map(grad, (num_rows, n), (tiles.block_k, tiles.block_n), dtype),
            "out_desc": tensor_map(out, (num_experts, k, n), (1, tiles.rows, tiles.columns), dtype),
            "ends": ends,
            "counter": Pointer("counter") if claims else None,
            "num_experts": num_experts,
            "K": k,
            "N": n,
            "BLOCK_R": tiles.block_k,
            "EXPERTS": searched_experts(num_experts) if claims else 0,
            "DYNAMIC": claims,
            **_sizes(tiles, num_experts if claims else 1),
        },
        **_options(tiles),
    )
    return launch, claims


class RowsProduct(Protocol):
    """Each expert's rows by its matrix: (R, K) and (E, K, N), or (E, N, K) if `transposed`, to (R, N)."""

    def __call__(self, x_RK: Tensor, w: Tensor, ends: Tensor, /, *, transposed: bool = False) -> Tensor:
        """Run it; `w` is contiguous."""


class SumOverRows(Protocol):
    """Each expert's x^T grad over its rows: (R, K) and (R, N) to (E, K, N)."""

    def __call__(self, x_RK: Tensor, grad_RN: Tensor, ends: Tensor, /) -> Tensor:
        """Run it."""


class GemmProducts(NamedTuple):
    """What computes the product, the gradient of the rows, and the gradient of the matrices."""

    forward: RowsProduct
    rows: RowsProduct
    matrices: SumOverRows


def differentiable_gemm(products: GemmProducts) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a function of x (R, K), w (E, K, N) and ends (E,) to (R, N), which is differentiable in x and w.

    w may be the transpose of a contiguous tensor. Its gradient then is one, too.
    """

    def multiply(x_RK: Tensor, w_EKN: Tensor, ends: Tensor) -> Tensor:
        out: Tensor = _apply(x_RK, w_EKN, ends, products)
        return out

    return multiply


class _Gemm(Function):
    @staticmethod
    def forward(ctx: Any, x_RK: Tensor, w_EKN: Tensor, ends: Tensor, products: GemmProducts) -> Tensor:
        ctx.save_for_backward(x_RK, w_EKN, ends)
        ctx.products = products
        w, transposed = stored(w_EKN)
        return products.forward(x_RK, w, ends, transposed=transposed)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_RK, w_EKN, ends = ctx.saved_tensors
        products: GemmProducts = ctx.products
        w, transposed = stored(w_EKN)
        grad_RN = grad_RN.contiguous()
        needs_x, needs_w, *_ = ctx.needs_input_grad
        grad_x = products.rows(grad_RN, w, ends, transposed=not transposed) if needs_x else None
        grad_w = None
        if needs_w:
            add_up = products.matrices
            grad_w = add_up(grad_RN, x_RK, ends).mT if transposed else add_up(x_RK, grad_RN, ends)
        return grad_x, grad_w, None, None


_apply = applied(_Gemm)


multiply = differentiable_gemm(GemmProducts(multiply_rows, multiply_rows, sum_over_rows))
"""`multiply_rows`, differentiable in x (R, K) and w (E, K, N)."""


def grouped_gemm(x_RK: Tensor, w_EKN: Tensor, rows: Rows) -> Tensor:
    """As in `GroupedGemm`."""
    return multiply(x_RK, w_EKN, rows.ends)


def _sizes(tiles: HopperTiles, num_experts: int) -> dict[str, int]:
    """What both kernels are compiled for."""
    return {
        "CONSUMERS": tiles.consumers,
        "ROWS": tiles.rows,
        "BLOCK_N": tiles.block_n,
        "WIDTH": tiles.width,
        "STAGES": tiles.stages,
        "BUFFERS": tiles.buffers,
        "GROUP_M": tiles.group_m,
        "PRODUCER_REGISTERS": tiles.producer_registers(num_experts),
        "CONSUMER_REGISTERS": tiles.consumer_registers(num_experts),
    }


def _options(tiles: HopperTiles) -> dict[str, int]:
    """What the compiler is told; the registers at the start bound what consumers and producer share."""
    return {"num_warps": WARPS_OF_A_GROUP, "maxnreg": tiles.launch_registers}
