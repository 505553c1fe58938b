"""The expert back ends by name. A new one is a module beside this one and an entry here."""

from __future__ import annotations

import torch

from bexp.kernels.experts.bmm import BMM
from bexp.kernels.experts.expert_backend import ExpertBackend
from bexp.kernels.experts.fused.fused_experts import FUSED
from bexp.kernels.experts.grouped_mm import GROUPED_MM
from bexp.kernels.experts.hopper_grouped.hopper_experts import HOPPER_GROUPED
from bexp.kernels.experts.loop import LOOP
from bexp.kernels.shapes import ExpertsShape, Support

_ALL = (GROUPED_MM, LOOP, BMM, HOPPER_GROUPED, FUSED)
_BACKENDS = {backend.name: backend for backend in _ALL}


def expert_backend(name: str) -> ExpertBackend:
    """The back end called `name`; ValueError if there is none."""
    if name not in _BACKENDS:
        raise ValueError(f"unknown expert back end '{name}'; there are {', '.join(_BACKENDS)}")
    return _BACKENDS[name]


def expert_backends() -> tuple[ExpertBackend, ...]:
    """Return all back ends."""
    return _ALL


def expert_support(shape: ExpertsShape, device: torch.device) -> tuple[Support, ...]:
    """Whether each back end serves `shape` on `device`, and why not."""
    return tuple(Support(backend.name, backend.unsupported_reason(shape, device), backend.stock) for backend in _ALL)


def default_expert_backend(shape: ExpertsShape, device: torch.device) -> str:
    """The back end of the base candidate: grouped_mm, or the loop where grouped_mm is unavailable."""
    return GROUPED_MM.name if GROUPED_MM.unsupported_reason(shape, device) is None else LOOP.name
