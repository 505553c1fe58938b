"""A persistent grouped GEMM in Triton: one launch for all experts, with their bounds on the device.

The idea of a persistent kernel that finds each tile's group comes from Triton's grouped GEMM tutorial. Here the groups
differ only in their number of rows, so one search over cumulative tile counts in registers replaces the loop over
groups.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from bexp.kernels.activations import Activation
from bexp.kernels.allocation import checked, empty
from bexp.kernels.dtypes import dtype_name
from bexp.kernels.experts.expert_backend import ExpertBackend
from bexp.kernels.experts.gemm_function import GemmProducts, differentiable_gemm
from bexp.kernels.experts.grouped_ffn import grouped_ffn
from bexp.kernels.experts.rows import Rows, sorted_rows
from bexp.kernels.experts.triton_tiles import Tiles, rows_tiles, weights_tiles
from bexp.kernels.launcher import (
    ALIGNMENT_BYTES,
    KEPT_LAUNCHES,
    Blocks,
    Launch,
    Launches,
    Pointer,
    current_stream,
    is_current,
)
from bexp.kernels.shapes import ExpertsShape
from bexp.kernels.triton_support import (
    has_bulk_copies,
    num_multiprocessors,
    triton_failure,
    triton_reason,
)

_DTYPES = (torch.bfloat16, torch.float16)


def multiply_rows(
    x_RK: Tensor,
    w: Tensor,
    ends: Tensor,
    *,
    transposed: bool = False,
    out: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """Each expert's rows by its matrix: (R, K) and (E, K, N), or (E, N, K) where `transposed`, to (R, N).

    `ends` (E,) int32 are the experts' last rows plus one, ascending to R. `out` is contiguous.
    """
    device = x_RK.get_device()
    if not is_current(device):
        with torch.cuda.device(device):
            return multiply_rows(x_RK, w, ends, transposed=transposed, out=out, tiles=tiles)
    whole, w = x_RK.is_contiguous(), w if w.is_contiguous() else w.contiguous()
    if not whole:
        x_RK = _with_dense_rows(x_RK)
    stride = None if whole else x_RK.stride(0)
    aligned = (x_RK.data_ptr() | w.data_ptr() | (0 if out is None else out.data_ptr())) % ALIGNMENT_BYTES == 0
    shape, strides, launch = _multiply_rows(
        x_RK.shape, stride, w.shape, x_RK.dtype, w.dtype, ends.dtype, transposed, aligned, tiles, device
    )
    out = empty(x_RK, shape, strides, x_RK.dtype) if out is None else checked(out, x_RK, shape)
    if launch is not None:
        launch(current_stream(device), x_RK, w, out, ends)
    return out


def sum_over_rows(
    x_RK: Tensor, grad_RN: Tensor, ends: Tensor, *, out: Tensor | None = None, tiles: Tiles | None = None
) -> Tensor:
    """Each expert's x^T grad over its rows: (R, K) and (R, N) to (E, K, N); zero for an expert without rows.

    `out` is contiguous.
    """
    device = x_RK.get_device()
    if not is_current(device):
        with torch.cuda.device(device):
            return sum_over_rows(x_RK, grad_RN, ends, out=out, tiles=tiles)
    whole = x_RK.is_contiguous() and grad_RN.is_contiguous()
    if not whole:
        x_RK, grad_RN = _with_dense_rows(x_RK), _with_dense_rows(grad_RN)
    row_strides = None if whole else (x_RK.stride(0), grad_RN.stride(0))
    aligned = (x_RK.data_ptr() | grad_RN.data_ptr() | (0 if out is None else out.data_ptr())) % ALIGNMENT_BYTES == 0
    shape, strides, launch = _sum_over_rows(
        x_RK.shape,
        grad_RN.shape,
        ends.shape,
        row_strides,
        x_RK.dtype,
        grad_RN.dtype,
        ends.dtype,
        aligned,
        tiles,
        device,
    )
    out = empty(x_RK, shape, strides, x_RK.dtype) if out is None else checked(out, x_RK, shape)
    if launch is None:
        return out.zero_()
    launch(current_stream(device), x_RK, grad_RN, out, ends)
    return out


@lru_cache(KEPT_LAUNCHES)
def _multiply_rows(
    x_shape: tuple[int, int],
    x_stride: int | None,
    w_shape: tuple[int, int, int],
    dtype: torch.dtype,
    w_dtype: torch.dtype,
    ends_dtype: torch.dtype,
    transposed: bool,
    aligned: bool,
    tiles: Tiles | None,
    device: int,
) -> tuple[tuple[int, int], tuple[int, int], Launches | None]:
    """The result's shape and strides, and the launch; None if there is nothing to write.

    Without a stride the rows of x lie together.
    """
    from bexp.kernels.experts.triton_gemm_kernels import rows_kernel  # noqa: PLC0415 - imports Triton

    num_rows, k = x_shape
    num_experts, n = w_shape[0], w_shape[1] if transposed else w_shape[2]
    assert w_shape[2 if transposed else 1] == k, "x (R, K) and w (E, K, N), or (E, N, K) if transposed"
    if num_rows == 0 or n == 0:
        return (num_rows, n), (n, 1), None
    place = _device(device)
    tiles = tiles or rows_tiles(num_rows / num_experts, place)
    m_tiles = -(-num_rows // tiles.block_m) + min(num_experts, num_rows)
    bulk = tiles.bulk_copies and aligned and x_stride is None and _bulk_copies(place, dtype, k, n)
    w_block = (1, tiles.block_n, tiles.block_k) if transposed else (1, tiles.block_k, tiles.block_n)
    x, w, out = Pointer("x"), Pointer("w"), Pointer("out")
    launch = Launch(
        rows_kernel,
        (_programs(tiles, m_tiles * -(-n // tiles.block_n), place),),
        {
            "x": x,
            "w": w,
            "out": out,
            "ends": Pointer("ends"),
            "num_experts": num_experts,
            "K": k,
            "N": n,
            "stride_x": k if x_stride is None else x_stride,
            "stride_we": w_shape[1] * w_shape[2],
            "stride_w": w_shape[2],
            "stride_out": n,
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            "BLOCK_K": tiles.block_k,
            "GROUP_M": tiles.group_m,
            "EXPERTS": max(16, 1 << (num_experts - 1).bit_length()),
            "TRANSPOSED": transposed,
            "USE_TMA": bulk,
            "FLATTEN": bulk and tiles.flatten,
            "HALVES": tiles.halves,
            "x_desc": Blocks(x, tuple(x_shape), (tiles.block_m, tiles.block_k)) if bulk else None,
            "w_desc": Blocks(w, tuple(w_shape), w_block) if bulk else None,
            "out_desc": Blocks(out, (num_rows, n), (tiles.block_m, tiles.stored_columns)) if bulk else None,
        },
        num_stages=tiles.num_stages,
        num_warps=tiles.num_warps,
    )
    return (num_rows, n), (n, 1), Launches(("x", "w", "out", "ends"), (launch,))


@lru_cache(KEPT_LAUNCHES)
def _sum_over_rows(
    x_shape: tuple[int, int],
    grad_shape: tuple[int, int],
    ends_shape: tuple[int],
    row_strides: tuple[int, int] | None,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    ends_dtype: torch.dtype,
    aligned: bool,
    tiles: Tiles | None,
    device: int,
) -> tuple[tuple[int, int, int], tuple[int, int, int], Launches | None]:
    """The same for the sum over rows; without rows there is no launch."""
    from bexp.kernels.experts.triton_gemm_kernels import weights_kernel  # noqa: PLC0415 - imports Triton

    (num_rows, k), n, num_experts = x_shape, grad_shape[1], ends_shape[0]
    shape, strides = (num_experts, k, n), (k * n, n, 1)
    if num_rows == 0:
        return shape, strides, None
    stride_x, stride_grad = row_strides or (k, n)
    place = _device(device)
    tiles = tiles or weights_tiles(num_rows / num_experts, place)
    num_tiles = num_experts * -(-k // tiles.block_m) * -(-n // tiles.block_n)
    bulk = tiles.bulk_copies and aligned and row_strides is None and _bulk_copies(place, dtype, k, n)
    x, grad, out = Pointer("x"), Pointer("grad"), Pointer("out")
    out_block = (1, tiles.block_m, tiles.stored_columns)
    launch = Launch(
        weights_kernel,
        (_programs(tiles, num_tiles, place),),
        {
            "x": x,
            "grad": grad,
            "out": out,
            "ends": Pointer("ends"),
            "num_experts": num_experts,
            "K": k,
            "N": n,
            "stride_x": stride_x,
            "stride_grad": stride_grad,
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            "BLOCK_R": tiles.block_k,
            "GROUP_M": tiles.group_m,
            "USE_TMA": bulk,
            "HALVES": tiles.halves,
            "x_desc": Blocks(x, (num_rows, k), (tiles.block_k, tiles.block_m)) if bulk else None,
            "grad_desc": Blocks(grad, (num_rows, n), (tiles.block_k, tiles.block_n)) if bulk else None,
            "out_desc": Blocks(out, (num_experts, k, n), out_block) if bulk else None,
        },
        num_stages=tiles.num_stages,
        num_warps=tiles.num_warps,
    )
    return shape, strides, Launches(("x", "grad", "out", "ends"), (launch,))


multiply = differentiable_gemm(GemmProducts(multiply_rows, multiply_rows, sum_over_rows))
"""`multiply_rows`, differentiable in x (R, K) and w (E, K, N)."""


def grouped_gemm(x_RK: Tensor, w_EKN: Tensor, rows: Rows) -> Tensor:
    """As in `GroupedGemm`."""
    return multiply(x_RK, w_EKN, rows.ends)


def _forward(
    x_TD: Tensor, routes_TK: Tensor, weights_TK: Tensor, w_in: Tensor, w_out: Tensor, activation: Activation
) -> Tensor:
    rows = sorted_rows(routes_TK, w_in.shape[0], count=False)
    return grouped_ffn(x_TD, weights_TK, w_in, w_out, activation, rows, grouped_gemm)


def _check(shape: ExpertsShape, device: torch.device) -> str | None:
    dtype = shape.dtype
    if dtype not in _DTYPES:
        return f"triton_grouped multiplies bfloat16 and float16, not {dtype_name(dtype)}"
    reason = triton_reason(device)
    if reason is not None:
        return reason
    x = torch.randn(32, 64, dtype=dtype, device=device, requires_grad=True)
    w = torch.randn(4, 64, 64, dtype=dtype, device=device, requires_grad=True)
    ends = torch.tensor([8, 8, 24, 32], dtype=torch.int32, device=device)
    return triton_failure(lambda: multiply(x, w, ends), device)


def _programs(tiles: Tiles, num_tiles: int, device: torch.device) -> int:
    return min(num_tiles, tiles.programs_per_multiprocessor * num_multiprocessors(device))


def _bulk_copies(device: torch.device, dtype: torch.dtype, *widths: int) -> bool:
    """Whether the device copies blocks of contiguous tensors with rows of these widths."""
    return has_bulk_copies(device) and all(
        width > 0 and width * dtype.itemsize % ALIGNMENT_BYTES == 0 for width in widths
    )


def _device(index: int) -> torch.device:
    return torch.device("cuda", index) if index >= 0 else torch.device("cpu")


def _with_dense_rows(x: Tensor) -> Tensor:
    """Rows may lie apart, their numbers may not: an expanded gradient is copied."""
    return x if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()


TRITON_GROUPED = ExpertBackend("triton_grouped", False, _check, _forward)
