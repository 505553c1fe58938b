"""The expert back ends by name: for each entry of `EXPERT_KERNELS` the module of its name in this folder.

The module, or the folder, holds the `ExpertBackend` in a constant of that name in capitals.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from importlib import import_module

import torch

from bexp.explorer.model.expert_kernels import EXPERT_KERNELS, NAMED_EXPERTS
from bexp.kernels.experts.expert_backend import ExpertBackend
from bexp.kernels.experts.grouped_mm import GROUPED_MM
from bexp.kernels.experts.loop import LOOP
from bexp.kernels.shapes import ExpertsShape, Support

_NAMES = tuple(kernel.name for kernel in EXPERT_KERNELS)


def expert_backend(name: str) -> ExpertBackend:
    """The back end called `name`; ValueError if there is none."""
    if name not in _NAMES:
        raise ValueError(f"unknown expert back end '{name}'; there are {', '.join(_NAMES)}")
    return _load(name)


def expert_backends() -> tuple[ExpertBackend, ...]:
    """Return all back ends."""
    return tuple(map(_load, _NAMES))


def expert_support(shape: ExpertsShape, device: torch.device, named: Collection[str] = ()) -> tuple[Support, ...]:
    """Whether each back end serves `shape` on `device`, and why not. Those that must be named are tried if they are."""
    from bexp.explorer.model.hardware import NAME_IT  # noqa: PLC0415 - kept light

    def reason(backend: ExpertBackend) -> str | None:
        if backend.name in NAMED_EXPERTS and backend.name not in named:
            return NAME_IT
        return backend.unsupported_reason(shape, device)

    return tuple(Support(backend.name, reason(backend), backend.stock) for backend in expert_backends())


def default_expert_backend(shape: ExpertsShape, device: torch.device) -> str:
    """The back end of the base candidate: grouped_mm, or the loop where grouped_mm is unavailable."""
    return GROUPED_MM.name if GROUPED_MM.unsupported_reason(shape, device) is None else LOOP.name


@functools.cache
def _load(name: str) -> ExpertBackend:
    backend: ExpertBackend = getattr(import_module(f"{__package__}.{name}"), name.upper())
    return backend
