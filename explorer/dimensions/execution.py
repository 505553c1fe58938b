"""How torch runs the code of a layer, and with which kernels."""

from __future__ import annotations

from enum import StrEnum


class Execution(StrEnum):
    """Operation by operation, compiled by torch.compile, or either of them replayed as CUDA graphs.

    The base (1.00x) is the first that a request admits.
    """

    EAGER = "eager"
    COMPILE = "compile"
    GRAPH = "graph"
    COMPILE_GRAPH = "compile+graph"

    @property
    def compiles(self) -> bool:
        """Whether torch.compile makes the kernels."""
        return self in {Execution.COMPILE, Execution.COMPILE_GRAPH}

    @property
    def replays(self) -> bool:
        """Whether the host issues a micro-step as two CUDA graphs instead of operation by operation."""
        return self in {Execution.GRAPH, Execution.COMPILE_GRAPH}

    @property
    def captured(self) -> Execution:
        """What runs when the graphs are captured, and whose kernels they replay; itself without graphs."""
        return Execution.COMPILE if self.compiles else Execution.EAGER


WAITING_EXPERTS = frozenset({"loop", "bmm", "eager"})
"""Expert back ends that wait for the device to count each expert's tokens. No graph can contain that."""


class Kernels(StrEnum):
    """What computes norms, rotation and gated activations: the model's own code, or the package liger-kernel.

    The base (1.00x) has the first that a request admits.
    """

    LIBRARY = "library"
    LIGER = "liger"
