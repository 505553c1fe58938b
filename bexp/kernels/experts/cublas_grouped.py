"""cuBLAS' grouped batched GEMM: one call for all experts, each with its own number of rows.

cuBLAS is column-major. It sees a row-major (r, c) matrix without gaps as the (c, r) transpose with a leading dimension
of c. So the transposed product is requested, and no operand is moved. X (m, k) are the rows of an expert, W (k, n) is
its matrix and G (m, n) the gradient of Y = X W, all row-major:

    wanted          asked for                 A       op(A)            B       op(B)            m'  n'  k'  C, ldc
    Y  = X W        Y^T  (n, m) = W^T X^T     W, n    N: (n, k)        X, k    N: (k, m)        n   m   k   Y, n
    dX = G W^T      dX^T (k, m) = W G^T       W, n    T of (n, k)      G, n    N: (n, m)        k   m   n   dX, k
    dW = X^T G      dW^T (n, k) = G^T X       G, n    N: (n, m)        X, k    T of (k, m)      n   k   m   dW, n

A W that is stored as its transpose V (n, k) exchanges the first two: Y = X V^T is the second product with V for W, dX =
G V the first, and dV = G^T X the third with X and G exchanged.

An expert without rows is left out: a group of size 0 is an error in the first two products. In the third its gradient
is a sum over nothing, and zeros are written for it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from bexp.kernels.activations import Activation
from bexp.kernels.dtypes import dtype_name
from bexp.kernels.experts.expert_backend import ExpertBackend
from bexp.kernels.experts.grouped_ffn import grouped_ffn
from bexp.kernels.experts.matrices import stored
from bexp.kernels.experts.rows import Rows, sorted_rows
from bexp.kernels.probe import failure_of
from bexp.kernels.shapes import ExpertsShape
from bexp.kernels.triton_support import aligned

OP_N, OP_T = 0, 1
_DATA_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_COMPUTE_32F = 68
"""Products and sums in float32; no TF32 unless the handle's math mode allows it, which by default it does not."""
_WORKSPACE_BYTES = 32 << 20
_FUNCTIONS = ("cublasCreate_v2", "cublasSetStream_v2", "cublasSetWorkspace_v2", "cublasGemmGroupedBatchedEx")
_ALIGNMENT_BYTES = 16


class CublasError(RuntimeError):
    """cuBLAS refused a call, or the library does not have the function."""


@dataclass(frozen=True, slots=True)
class Product:
    """One C = op(A) op(B) in cuBLAS' terms, all column-major: C is (m, n), op(A) (m, k), op(B) (k, n).

    `a`, `b` and `c` are device addresses, `lda`, `ldb` and `ldc` the distances between columns in numbers.
    """

    op_a: int
    op_b: int
    m: int
    n: int
    k: int
    a: int
    lda: int
    b: int
    ldb: int
    c: int
    ldc: int


def rows_products(x_RK: Tensor, w: Tensor, out_RN: Tensor, counts: tuple[int, ...], *, by: int) -> list[Product]:
    """Each expert's rows times its matrix `w` as it lies: (E, K, N) by `OP_N`, or (E, N, K) by `OP_T`."""
    k, n = x_RK.shape[1], out_RN.shape[1]
    return [
        Product(by, OP_N, n, m, k, a=_at(w, e), lda=w.shape[2], b=_at(x_RK, row), ldb=k, c=_at(out_RN, row), ldc=n)
        for e, row, m in _with_rows(counts)
    ]


def sum_products(x_RK: Tensor, grad_RN: Tensor, out_EKN: Tensor, counts: tuple[int, ...]) -> list[Product]:
    """X^T G for every expert that has rows."""
    k, n = x_RK.shape[1], grad_RN.shape[1]
    return [
        Product(OP_N, OP_T, n, k, m, a=_at(grad_RN, row), lda=n, b=_at(x_RK, row), ldb=k, c=_at(out_EKN, e), ldc=n)
        for e, row, m in _with_rows(counts)
    ]


class CublasGemm(Function):
    """Three calls: the product, and in backward its two gradients. The gradient of w lies as w does."""

    @staticmethod
    def forward(ctx: Any, x_RK: Tensor, w_EKN: Tensor, counts: tuple[int, ...]) -> Tensor:
        """x (R, K), w (E, K, N) and the experts' rows to (R, N)."""
        w, transposed = stored(w_EKN)
        x_RK, w = aligned(x_RK), aligned(w)
        ctx.save_for_backward(x_RK, w)
        ctx.counts, ctx.transposed = counts, transposed
        out = x_RK.new_empty(x_RK.shape[0], w_EKN.shape[2])
        multiply_all(rows_products(x_RK, w, out, counts, by=OP_T if transposed else OP_N), x_RK.dtype, x_RK.device)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """The gradients of x and w."""
        x_RK, w = ctx.saved_tensors
        counts: tuple[int, ...] = ctx.counts
        grad_RN = aligned(grad_RN)
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.empty_like(x_RK)
            by = OP_N if ctx.transposed else OP_T
            multiply_all(rows_products(grad_RN, w, grad_x, counts, by=by), x_RK.dtype, x_RK.device)
        if ctx.needs_input_grad[1]:
            grad_w = torch.empty_like(w)
            for out, count in zip(grad_w.unbind(), counts, strict=True):
                if not count:
                    out.zero_()
            first, second = (grad_RN, x_RK) if ctx.transposed else (x_RK, grad_RN)
            multiply_all(sum_products(first, second, grad_w, counts), x_RK.dtype, x_RK.device)
            grad_w = grad_w.mT if ctx.transposed else grad_w
        return grad_x, grad_w, None


def grouped_gemm(x_RK: Tensor, w_EKN: Tensor, rows: Rows) -> Tensor:
    """As in `GroupedGemm`; the rows must have been counted."""
    out: Tensor = CublasGemm.apply(x_RK, w_EKN, rows.counts)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


def multiply_all(products: list[Product], dtype: torch.dtype, device: torch.device) -> None:
    """Run the products, each a group of its own, on torch's current stream; CublasError if cuBLAS refuses.

    Sizes are read on the host. The arrays of addresses are in device memory, where cuBLAS wants them, in a buffer from
    torch's allocator: it is not handed out again before the work queued here is done with it.
    """
    if not products:
        return
    count = len(products)
    host = torch.zeros(3, count + count % 2, dtype=torch.int64)  # each array on a boundary of 16 bytes
    host[:, :count] = torch.tensor([[p.a for p in products], [p.b for p in products], [p.c for p in products]])
    addresses = host.pin_memory().to(device, non_blocking=True)
    first, row = addresses.data_ptr(), addresses.stride(0) * addresses.element_size()

    def ints(values: list[int]) -> ctypes.Array[ctypes.c_int]:
        return (ctypes.c_int * count)(*values)

    ones, zeros = (ctypes.c_float * count)(*[1.0] * count), (ctypes.c_float * count)()
    data_type = ctypes.c_int(_DATA_TYPES[dtype])
    with torch.cuda.device(device):
        handle = _handle(device, torch.cuda.current_stream(device).cuda_stream)
        _require(
            library().cublasGemmGroupedBatchedEx(
                handle.pointer,
                ints([p.op_a for p in products]),
                ints([p.op_b for p in products]),
                ints([p.m for p in products]),
                ints([p.n for p in products]),
                ints([p.k for p in products]),
                ones,
                ctypes.c_void_p(first),
                data_type,
                ints([p.lda for p in products]),
                ctypes.c_void_p(first + row),
                data_type,
                ints([p.ldb for p in products]),
                zeros,
                ctypes.c_void_p(first + 2 * row),
                data_type,
                ints([p.ldc for p in products]),
                ctypes.c_int(count),
                ints([1] * count),
                ctypes.c_int(_COMPUTE_32F),
            ),
            "cublasGemmGroupedBatchedEx",
        )


@functools.cache
def library() -> ctypes.CDLL:
    """The libcublas of this process, else the one of torch's CUDA version; CublasError if it has no grouped GEMM."""
    name = _loaded_library() or f"libcublas.so.{(torch.version.cuda or '').partition('.')[0]}"
    try:
        loaded = ctypes.CDLL(name)
    except OSError as error:
        raise CublasError(f"cuBLAS cannot be loaded: {error}") from error
    for function in _FUNCTIONS:
        if not hasattr(loaded, function):
            raise CublasError(f"{Path(name).name} has no {function}")
        getattr(loaded, function).restype = ctypes.c_int
    return loaded


@dataclass(frozen=True, slots=True)
class _Handle:
    pointer: ctypes.c_void_p
    workspace: Tensor


@functools.cache
def _handle(device: torch.device, stream: int) -> _Handle:
    """One for a device and a stream, with a workspace that lives as long: calls on a stream follow one another."""
    pointer = ctypes.c_void_p()
    _require(library().cublasCreate_v2(ctypes.byref(pointer)), "cublasCreate")
    _require(library().cublasSetStream_v2(pointer, ctypes.c_void_p(stream)), "cublasSetStream")
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    address, size = ctypes.c_void_p(workspace.data_ptr()), ctypes.c_size_t(_WORKSPACE_BYTES)
    _require(library().cublasSetWorkspace_v2(pointer, address, size), "cublasSetWorkspace")
    return _Handle(pointer, workspace)


def _loaded_library() -> str | None:
    """Path of the libcublas that is mapped into this process; None if none is."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    paths = (line.split(maxsplit=5)[-1].strip() for line in maps.read_text().splitlines() if "/libcublas.so" in line)
    return next(paths, None)


def _require(status: int, function: str) -> None:
    if status:
        raise CublasError(f"{function} failed with cuBLAS status {status}")


def _with_rows(counts: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """Yield expert, its first row, and how many."""
    row = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, row, count
        row += count


def _at(tensor: Tensor, index: int) -> int:
    """Return the address of `tensor[index]`."""
    return tensor.data_ptr() + index * tensor.stride(0) * tensor.element_size()


def _forward(
    x_TD: Tensor, routes_TK: Tensor, weights_TK: Tensor, w_in: Tensor, w_out: Tensor, activation: Activation
) -> Tensor:
    rows = sorted_rows(routes_TK, w_in.shape[0], count=True)
    return grouped_ffn(x_TD, weights_TK, w_in, w_out, activation, rows, grouped_gemm)


def _check(shape: ExpertsShape, device: torch.device) -> str | None:
    if device.type != "cuda":
        return "cuBLAS needs a CUDA device"
    if shape.dtype not in _DATA_TYPES:
        return f"cuBLAS' grouped GEMM has no products of {dtype_name(shape.dtype)}"
    sizes = {"hidden_size": shape.hidden_size, "expert_ffn_hidden_size": shape.ffn_hidden_size}
    for name, size in sizes.items():
        if size * shape.dtype.itemsize % _ALIGNMENT_BYTES:
            multiple = _ALIGNMENT_BYTES // shape.dtype.itemsize
            dtype = dtype_name(shape.dtype)
            return f"cuBLAS' grouped GEMM needs {name} to be a multiple of {multiple} in {dtype}, not {size}"
    try:
        library()
    except CublasError as error:
        return str(error)

    x = torch.randn(32, 64, dtype=shape.dtype, device=device, requires_grad=True)
    w = torch.randn(4, 64, 64, dtype=shape.dtype, device=device, requires_grad=True)
    return failure_of(lambda: CublasGemm.apply(x, w, (8, 0, 16, 8)), device)  # type: ignore[no-untyped-call]  # in torch


CUBLAS_GROUPED = ExpertBackend("cublas_grouped", False, _check, _forward)
