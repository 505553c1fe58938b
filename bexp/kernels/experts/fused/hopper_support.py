"""Finds out whether the Hopper kernels of the fused FFN run on a device. Otherwise the Triton kernels are used."""

from __future__ import annotations

import functools

import torch

from bexp.kernels.experts.hopper_grouped.hopper_experts import gluon_reason

_CAPABILITY = (9, 0)


@functools.cache
def has_hopper_kernels(device: torch.device) -> bool:
    """Whether `device` is of compute capability 9.0 and this Triton has the Gluon that they are written in."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != _CAPABILITY or gluon_reason() is not None:
        return False
    try:
        from bexp.kernels.experts.fused import hopper_differentiate_hidden, hopper_gate_up_gemm  # noqa: F401, PLC0415 - the import is what is tried; it needs Triton
    except (ImportError, AttributeError, TypeError):
        return False
    return True
