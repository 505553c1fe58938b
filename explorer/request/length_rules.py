"""The rules of texts of unequal length."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.model.base import RuleError
from bexp.explorer.model.lengths import PACKED
from bexp.explorer.model.target import TRANSFORMERS

if TYPE_CHECKING:
    from bexp.explorer.request.request import ExplorationRequest


def check_lengths(request: ExplorationRequest) -> None:
    """Texts of unequal length are measured eagerly on one device, with the transformers library's classes."""
    if request.lengths is None:
        if request.batching is not None:
            raise RuleError("batching needs lengths: without them every sequence is full", "batching", "lengths")
        return
    if request.target_name != TRANSFORMERS:
        raise RuleError(f"texts of unequal length need target '{TRANSFORMERS}'", "lengths", "target")
    if request.num_devices > 1:
        raise RuleError("texts of unequal length are measured on one device", "lengths", "num_devices")
    if request.space.executions != (Execution.EAGER,):
        field = "execution" if request.executions is None else "executions"
        raise RuleError(
            "texts of unequal length run with execution 'eager': other lengths would be compiled or captured anew",
            field,
            "lengths",
        )
    if request.batching in PACKED and request.bta.is_named:
        raise RuleError("attention tiles divide padded rows, not packed ones", "bta", "batching")
