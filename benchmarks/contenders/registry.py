"""The expert FFNs to compare with, by name: the product's back ends, and those that exist only to be compared with."""

from __future__ import annotations

import torch

from benchmarks.contenders.block_sparse import BLOCK_SPARSE
from benchmarks.contenders.cublas_grouped import CUBLAS_GROUPED
from benchmarks.contenders.quack_experts import QUACK
from bexp.kernels.experts.expert_backend import ExpertBackend
from bexp.kernels.experts.registry import expert_backend, expert_backends
from bexp.kernels.shapes import ExpertsShape

COMPARED = {backend.name: backend for backend in (CUBLAS_GROUPED, BLOCK_SPARSE, QUACK)}


def contender(name: str) -> ExpertBackend:
    """Return the back end called `name`; ValueError if there is none."""
    return COMPARED[name] if name in COMPARED else expert_backend(name)


def usable_contenders(shape: ExpertsShape, device: torch.device) -> tuple[str, ...]:
    """Return the names of all that serve `shape` on `device`."""
    contenders = (*expert_backends(), *COMPARED.values())
    return tuple(backend.name for backend in contenders if backend.unsupported_reason(shape, device) is None)
