"""How torch runs the code of a layer, and with which kernels."""

from __future__ import annotations

from enum import StrEnum


class Execution(StrEnum):
    """Operation by operation, or compiled by torch.compile. The base (1.00x) is the first that a request admits."""

    EAGER = "eager"
    COMPILE = "compile"


class Kernels(StrEnum):
    """What computes norms, rotation and gated activations: the model's own code, or the package liger-kernel.

    The base (1.00x) has the first that a request admits.
    """

    LIBRARY = "library"
    LIGER = "liger"
