"""The back ends that can serve a job's model on this device."""

from __future__ import annotations

from collections.abc import Collection

import torch

from bexp.explorer.dimensions.execution import EXECUTION, Execution
from bexp.explorer.model.expert_kernels import NAMED_EXPERTS
from bexp.explorer.model.hardware import BackendSupport, HardwareSpec
from bexp.explorer.model.model import ModelSpec
from bexp.explorer.records.device_report import DeviceReport
from bexp.kernels.attention import attention_support, default_attention_backend
from bexp.kernels.context_parallel.attention import context_parallel_reason
from bexp.kernels.experts.registry import default_expert_backend, expert_support
from bexp.kernels.shapes import AttentionShape, Support
from bexp.workers.instruments.kernel_shapes import attention_shape, experts_shape

NO_GRAPHS = "CUDA graphs need a GPU"


def report_device(
    model: ModelSpec,
    hardware: HardwareSpec,
    device: torch.device,
    *,
    named_experts: Collection[str] = (),
    chooses_execution: bool = False,
) -> DeviceReport:
    """Try every registered back end on a small example of `model`, but only the `named_experts` of those to be named.

    With `chooses_execution`, the executions are reported, too.
    """
    attention, experts = attention_shape(model), experts_shape(model)
    expert_backends = expert_support(experts, device, named_experts) if experts is not None else ()
    executions = execution_support(None if device.type == "cuda" else NO_GRAPHS)
    return DeviceReport(
        hardware=hardware,
        attention_backends=tuple(
            _attention(support, attention, device) for support in attention_support(attention, device)
        ),
        expert_backends=tuple(_record(support) for support in expert_backends),
        choices={EXECUTION.name: executions} if chooses_execution else {},
        default_attention=default_attention_backend(attention, device),
        default_experts=default_expert_backend(experts, device) if experts is not None else None,
    )


def execution_support(reason: str | None) -> tuple[BackendSupport, ...]:
    """Return which executions can be used; `reason` says why those that replay CUDA graphs cannot."""
    return tuple(
        BackendSupport(name=one, usable=not one.replays or reason is None, reason=reason if one.replays else None)
        for one in Execution
    )


def _record(support: Support) -> BackendSupport:
    return BackendSupport(
        name=support.name,
        usable=support.usable,
        reason=support.reason,
        stock=support.stock,
        only_when_named=support.name in NAMED_EXPERTS,
    )


def _attention(support: Support, shape: AttentionShape, device: torch.device) -> BackendSupport:
    """`support`, and whether it serves sequences that devices share. Their length is judged with the request."""
    reason = support.reason
    if support.usable:
        try:
            reason = context_parallel_reason(shape, 1, "ring", support.name, device)
        except ValueError as error:
            reason = str(error)
    return _record(support).model_copy(update={"context_parallel": reason is None, "context_parallel_reason": reason})
