"""The back end on quack's GEMMs, and the conditions under which it can be used.

The check builds no kernel. The first step of a process builds six, for one dtype, activation and layout of the weights:
about 20 seconds of one CPU core, of which quack keeps the result on disk for later processes. Two more are built once
the rows an expert are many.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util

import torch
from torch import Tensor

from benchmarks.contenders.quack_gemms import GATED_ACTIVATIONS
from bexp.kernels.activations import Activation
from bexp.kernels.dtypes import dtype_name
from bexp.kernels.experts.expert_backend import ExpertBackend
from bexp.kernels.shapes import ExpertsShape
from bexp.kernels.triton_support import triton_reason

_DTYPES = (torch.bfloat16, torch.float16)
_MULTIPLE = 8  # elements of two bytes in the 16 bytes that rows of a tensor map are aligned to
_CAPABILITY = (9, 0)
_SERIES = "0.6"
"""The releases whose signatures `gemms` knows."""


def _forward(
    x_TD: Tensor, routes_TK: Tensor, weights_TK: Tensor, w_in: Tensor, w_out: Tensor, activation: Activation
) -> Tensor:
    from benchmarks.contenders.quack_function import quack_ffn  # noqa: PLC0415 - beside the other optional kernels

    return quack_ffn(x_TD, routes_TK, weights_TK, w_in, w_out, activation)


def _check(shape: ExpertsShape, device: torch.device) -> str | None:
    reason = _shape_reason(shape) or _package_reason() or triton_reason(device)
    if reason is not None:
        return reason
    capability = torch.cuda.get_device_capability(device)
    if capability != _CAPABILITY:
        return f"the quack experts are written for compute capability 9.0, not {capability[0]}.{capability[1]}"
    return _import_reason()


def _shape_reason(shape: ExpertsShape) -> str | None:
    if not shape.gated or shape.activation not in GATED_ACTIVATIONS:
        known = ", ".join(GATED_ACTIVATIONS)
        gated = "gated" if shape.gated else "plain"
        return f"the quack experts know the gated activations {known}, not the {gated} {shape.activation}"
    if shape.dtype not in _DTYPES:
        return f"the quack experts take bfloat16 and float16, not {dtype_name(shape.dtype)}"
    sizes = {"hidden_size": shape.hidden_size, "expert_ffn_hidden_size": shape.ffn_hidden_size}
    for name, size in sizes.items():
        if size % _MULTIPLE:
            return f"the quack experts need {name} to be a multiple of {_MULTIPLE}, not {size}"
    return None


def _package_reason() -> str | None:
    if importlib.util.find_spec("quack") is None:
        return "quack-kernels is not installed: pip install 'quack-kernels>=0.6.5,<0.7' 'apache-tvm-ffi<0.2'"
    try:
        version = importlib.metadata.version("quack-kernels")
    except importlib.metadata.PackageNotFoundError:
        return "the installed package 'quack' is not quack-kernels"
    if not version.startswith(f"{_SERIES}."):
        return f"the quack experts need quack-kernels {_SERIES}, not {version}"
    return None


@functools.cache
def _import_reason() -> str | None:
    """Return why quack cannot be imported, which takes seconds."""
    try:
        importlib.import_module("quack.gemm_interface")
    except Exception as error:  # noqa: BLE001 - it loads a compiler, whose libraries fail in ways of their own
        return f"quack cannot be imported: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return None


QUACK = ExpertBackend("quack", False, _check, _forward, only_when_named=True)
