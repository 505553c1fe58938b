"""How torch runs the code of a layer."""

from __future__ import annotations

from enum import StrEnum


class Execution(StrEnum):
    """Operation by operation, or compiled by torch.compile. The base (1.00x) is the first that a request admits."""

    EAGER = "eager"
    COMPILE = "compile"
