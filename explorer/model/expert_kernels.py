"""The expert back ends by name. The module imports next to nothing, because kernels load it in any training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertKernel:
    """What is known of an expert back end without its code: the module of its name in `bexp/kernels/experts`."""

    name: str
    library: str | None = None
    """Its name in the transformers library. One of ours has None, and the prefix `bexp_` there."""
    is_explored: bool = True
    """Whether it is explored without being named: it was the fastest in some recorded cell."""
    waits: bool = False
    """Whether it waits for the device to count each expert's tokens. No graph can contain that."""

    @property
    def in_library(self) -> str:
        """Its name in the experts interface of the transformers library."""
        return self.library or f"bexp_{self.name}"


EXPERT_KERNELS = (
    ExpertKernel("grouped_mm", library="grouped_mm"),
    ExpertKernel("loop", library="eager", waits=True),
    ExpertKernel("bmm", library="batched_mm", waits=True),
    ExpertKernel("hopper_grouped"),
    ExpertKernel("fused"),
    ExpertKernel("cublas_grouped", is_explored=False, waits=True),
    ExpertKernel("block_sparse", is_explored=False, waits=True),
    ExpertKernel("liger", is_explored=False, waits=True),
    ExpertKernel("sonicmoe", is_explored=False),
    ExpertKernel("deepgemm", is_explored=False, waits=True),
)
"""The expert back ends. A new one is an entry here and its module."""
NAMED_LIBRARY_EXPERTS = ("sonicmoe", "deepgemm")
"""Implementations of the transformers library that load kernels of a hub, which must be named."""
NAMED_EXPERTS = frozenset(
    {name for kernel in EXPERT_KERNELS if not kernel.is_explored for name in (kernel.name, kernel.in_library)}
) | {*NAMED_LIBRARY_EXPERTS}
"""Expert back ends of both targets that are tried only if a request names them."""
