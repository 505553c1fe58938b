"""The fused back end, and the conditions under which it can be used."""

from __future__ import annotations

import importlib.util
from functools import partial

import torch
from torch import Tensor

from bexp.kernels.activations import Activation
from bexp.kernels.dtypes import dtype_name
from bexp.kernels.experts.expert_backend import ExpertBackend
from bexp.kernels.probe import failure_of
from bexp.kernels.shapes import ExpertsShape
from bexp.out_of_memory import is_out_of_memory

_DTYPES = (torch.bfloat16, torch.float16)
_MULTIPLE = 8  # elements of two bytes in the 16 bytes that one load and one row of a tensor map are aligned to
_MIN_CAPABILITY = (9, 0)
_PROBED_TOKENS = (16, 512)
"""Few and many rows per expert, for which different kernels are used."""
_TRACEABLE = frozenset(_DTYPES)


def _forward(
    x_TD: Tensor, routes_TK: Tensor, weights_TK: Tensor, w_in: Tensor, w_out: Tensor, activation: Activation
) -> Tensor:
    if torch.compiler.is_compiling() and routes_TK.numel():
        from bexp.kernels.experts.fused.operators import fused_experts  # noqa: PLC0415 - needs Triton

        keep = torch.is_grad_enabled()
        out: Tensor = fused_experts(x_TD, routes_TK, weights_TK, w_in, w_out, activation, keep)[0]
        return out
    from bexp.kernels.experts.fused.function import fused_ffn  # noqa: PLC0415 - needs Triton

    return fused_ffn(x_TD, routes_TK, weights_TK, w_in, w_out, activation)


def _check(shape: ExpertsShape, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"the fused experts need a CUDA device, not {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        return f"the fused experts need compute capability 9.0, not {capability[0]}.{capability[1]}"
    if shape.dtype not in _DTYPES:
        return f"the fused experts take bfloat16 and float16, not {dtype_name(shape.dtype)}"
    sizes = {"hidden_size": shape.hidden_size, "expert_ffn_hidden_size": shape.ffn_hidden_size}
    for name, size in sizes.items():
        if size % _MULTIPLE:
            return f"the fused experts need {name} to be a multiple of {_MULTIPLE}, not {size}"
    try:
        probes = (partial(_probe, num_tokens, shape.dtype, device) for num_tokens in _PROBED_TOKENS)
        reasons = (failure_of(probe, device) for probe in probes)
        return next((reason for reason in reasons if reason is not None), None)
    except Exception as error:  # Triton and the compilers that it calls raise errors of their own
        if is_out_of_memory(error):
            raise
        return f"Triton cannot build the kernels: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _probe(num_tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    x, w_in, w_out = (
        torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
        for shape in ((num_tokens, 64), (4, 64, 64), (4, 32, 64))
    )
    routes = torch.arange(num_tokens, device=device).remainder(3).view(num_tokens, 1)
    return _forward(x, routes, torch.ones_like(routes, dtype=dtype), w_in, w_out, "silu")


FUSED = ExpertBackend("fused", False, _check, _forward, _TRACEABLE)
