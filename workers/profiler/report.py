"""Which back ends can serve a job's model on this device."""

from __future__ import annotations

import torch

from explorer.hardware import DeviceReport, HardwareSpec
from explorer.models import ModelSpec
from workers.kernels.attention import attention_support, default_attention_backend
from workers.kernels.experts.registry import default_expert_backend, expert_support


def report_device(model: ModelSpec, hardware: HardwareSpec, device: torch.device) -> DeviceReport:
    """Try every registered back end on a small example of `model`."""
    return DeviceReport(
        hardware=hardware,
        attention_backends=attention_support(model, device),
        expert_backends=expert_support(model, device),
        default_attention=default_attention_backend(model, device),
        default_experts=default_expert_backend(model, device),
    )
