"""What is explored where a request names nothing: whatever a person can have without asking for it.

That is what changes no numbers beyond the order of sums, and what the trainer can be told. Precision, dropped tokens
and the optimizer are never among it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bexp.explorer.dimensions.dimension import Place
from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.dimensions.kernels import Kernels
from bexp.explorer.model.target import BEXP, TRANSFORMERS

if TYPE_CHECKING:
    from bexp.explorer.request.request import ExplorationRequest


def default_executions(request: ExplorationRequest, device_kind: str | None) -> tuple[Execution, ...]:
    """Return the executions to explore on a kind of device; None is one that is not known yet.

    CUDA graphs are for training on one GPU. Lengths that differ from batch to batch would be compiled and captured
    anew, so texts of unequal length run eagerly, as does what several devices compute together.
    """
    if _is_quick(request, device_kind) or request.lengths is not None or request.devices.is_mesh:
        return (Execution.EAGER,)
    if max(request.devices.context_parallel_sizes, default=1) > 1:
        return (Execution.EAGER,)
    trainer = request.runner
    replays = trainer.graphs and request.num_devices == 1 and request.mode == "train" and not request.space.drops_tokens
    return tuple(
        execution
        for execution in Execution
        if (trainer.compiled_layers or not execution.compiles) and (replays or not execution.replays)
    )


def place_of(request: ExplorationRequest, device_kind: str | None) -> Place:
    """Return where the candidates of a request would run."""
    is_quick = _is_quick(request, device_kind)
    return Place(request.target_name, device_kind or request.device_kind, is_quick)


def default_kernels(request: ExplorationRequest, device_kind: str | None) -> tuple[Kernels, ...]:
    """Return what may compute norms, rotation and gated activations of a transformers model."""
    if _is_quick(request, device_kind) or request.target_name != TRANSFORMERS or not request.runner.liger:
        return (Kernels.LIBRARY,)
    return tuple(Kernels)


def _is_quick(request: ExplorationRequest, device_kind: str | None) -> bool:
    """Whether only eager code and the library's own loss are explored: on a CPU, if asked, and for other targets."""
    is_cpu = "cpu" in (device_kind, request.device_kind)
    return request.quick or is_cpu or request.target_name not in (BEXP, TRANSFORMERS)
