"""Finds the back ends that can serve a job's model on this device."""

from __future__ import annotations

import torch

from bexp.kernels.attention import attention_support, default_attention_backend
from bexp.kernels.context_parallel.attention import context_parallel_reason
from bexp.kernels.experts.registry import default_expert_backend, expert_support
from explorer.spec.hardware import BackendSupport, DeviceReport, HardwareSpec
from explorer.spec.model import ModelSpec


def report_device(model: ModelSpec, hardware: HardwareSpec, device: torch.device) -> DeviceReport:
    """Try every registered back end on a small example of `model`."""
    return DeviceReport(
        hardware=hardware,
        attention_backends=tuple(
            _with_context_parallel(found, model, device) for found in attention_support(model, device)
        ),
        expert_backends=expert_support(model, device),
        default_attention=default_attention_backend(model, device),
        default_experts=default_expert_backend(model, device),
    )


def _with_context_parallel(found: BackendSupport, model: ModelSpec, device: torch.device) -> BackendSupport:
    """`found` with its support for sequences that devices share. The request checks their length."""
    reason = found.reason
    if found.usable:
        try:
            reason = context_parallel_reason(model, 1, "ring", found.name, device)
        except ValueError as error:
            reason = str(error)
    return found.model_copy(update={"context_parallel": reason is None, "context_parallel_reason": reason})
