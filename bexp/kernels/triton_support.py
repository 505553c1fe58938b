"""Finds out whether Triton kernels run on a device. Triton is optional, because machines without a GPU have none."""

from __future__ import annotations

import contextlib
import functools
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from typing import Concatenate, ParamSpec, TypeVar

import torch

from bexp.kernels.launcher import is_current
from bexp.kernels.probe import failure_of
from bexp.out_of_memory import is_out_of_memory

P = ParamSpec("P")
R = TypeVar("R")

_OLDEST_CAPABILITY = (8, 0)
_BULK_COPY_BYTES = 16


@functools.cache
def triton_reason(device: torch.device) -> str | None:
    """Return why no Triton kernel can run on `device`; None if no reason is known. Nothing is compiled for this."""
    if device.type != "cuda":
        return "Triton kernels need a CUDA device"
    if find_spec("triton") is None:
        return "Triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST_CAPABILITY:
        return f"Triton kernels need compute capability 8.0, not {capability[0]}.{capability[1]}"
    return None


def triton_failure(run: Callable[[], torch.Tensor], device: torch.device) -> str | None:
    """Compile and run a small forward and backward; return None if both work, else the reason in one line."""
    from triton.errors import TritonError  # noqa: PLC0415 - optional

    try:
        return failure_of(run, device)
    except (TritonError, OSError, subprocess.CalledProcessError) as error:  # the kernel, its launcher's C compiler
        if is_out_of_memory(error):
            raise
        return f"Triton: {str(error).strip().splitlines()[0]}"


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a CUDA device; 1 for the CPU, where Triton's interpreter runs."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return `x` contiguous and aligned to 16 bytes, as descriptors need it. A slice of a flat parameter may not be."""
    if not tensor.is_contiguous():
        return tensor.contiguous()
    return tensor if tensor.data_ptr() % _BULK_COPY_BYTES == 0 else tensor.clone()


def launching_on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make `device` the current device, on which Triton launches."""
    index = -1 if device.type != "cuda" else device.index
    if index is not None and is_current(index):
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def launched_where_it_lies(
    function: Callable[Concatenate[torch.Tensor, P], R],
) -> Callable[Concatenate[torch.Tensor, P], R]:
    """Wrap `function` so that its kernels run on the device of its first tensor, whichever device is current."""

    @functools.wraps(function)
    def launch(first: torch.Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if is_current(first.get_device()):
            return function(first, *args, **kwargs)
        with torch.cuda.device(first.device):
            return function(first, *args, **kwargs)

    return launch
