"""The expert back ends by name. A new one is a module beside this and an entry here; the search needs no change."""

from __future__ import annotations

import torch

from bexp.kernels.experts.backend import ExpertBackend
from bexp.kernels.experts.bmm import BMM
from bexp.kernels.experts.comparisons.block_sparse import BLOCK_SPARSE
from bexp.kernels.experts.comparisons.cublas_grouped import CUBLAS_GROUPED
from bexp.kernels.experts.fused.backend import FUSED
from bexp.kernels.experts.grouped_mm import GROUPED_MM
from bexp.kernels.experts.hopper.backend import HOPPER_GROUPED
from bexp.kernels.experts.loop import LOOP
from bexp.kernels.experts.triton_gemm import TRITON_GROUPED
from explorer.spec.hardware import BackendSupport
from explorer.spec.model import ModelSpec

_ALL = (GROUPED_MM, LOOP, BMM, CUBLAS_GROUPED, TRITON_GROUPED, HOPPER_GROUPED, BLOCK_SPARSE, FUSED)
_BACKENDS = {backend.name: backend for backend in _ALL}


def expert_backend(name: str) -> ExpertBackend:
    """The back end called `name`; ValueError if there is none."""
    if name not in _BACKENDS:
        raise ValueError(f"unknown expert back end '{name}'; there are {', '.join(_BACKENDS)}")
    return _BACKENDS[name]


def expert_support(model: ModelSpec, device: torch.device) -> tuple[BackendSupport, ...]:
    """For every back end, whether it serves `model` on `device`, and why not. Empty for a model without experts."""
    if model.moe is None:
        return ()
    reasons = {name: backend.unsupported_reason(model, device) for name, backend in _BACKENDS.items()}
    return tuple(
        BackendSupport(name=name, usable=reason is None, reason=reason, stock=_BACKENDS[name].stock)
        for name, reason in reasons.items()
    )


def default_expert_backend(model: ModelSpec, device: torch.device) -> str | None:
    """What the base candidate uses: grouped_mm, or the loop where that is unavailable; null without experts."""
    if model.moe is None:
        return None
    return GROUPED_MM.name if GROUPED_MM.unsupported_reason(model, device) is None else LOOP.name
