"""cuBLAS' grouped batched GEMM, called in the library that torch has loaded."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

OP_N, OP_T = 0, 1
_DATA_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_COMPUTE_32F = 68
"""Products and sums in float32; no TF32 unless the handle's math mode allows it, which by default it does not."""
_WORKSPACE_BYTES = 32 << 20
_FUNCTIONS = ("cublasCreate_v2", "cublasSetStream_v2", "cublasSetWorkspace_v2", "cublasGemmGroupedBatchedEx")


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
        _check(
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
    _check(library().cublasCreate_v2(ctypes.byref(pointer)), "cublasCreate")
    _check(library().cublasSetStream_v2(pointer, ctypes.c_void_p(stream)), "cublasSetStream")
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    address, size = ctypes.c_void_p(workspace.data_ptr()), ctypes.c_size_t(_WORKSPACE_BYTES)
    _check(library().cublasSetWorkspace_v2(pointer, address, size), "cublasSetWorkspace")
    return _Handle(pointer, workspace)


def _loaded_library() -> str | None:
    """Path of the libcublas that is mapped into this process; None if none is."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    paths = (line.split(maxsplit=5)[-1].strip() for line in maps.read_text().splitlines() if "/libcublas.so" in line)
    return next(paths, None)


def _check(status: int, function: str) -> None:
    if status:
        raise CublasError(f"{function} failed with cuBLAS status {status}")
