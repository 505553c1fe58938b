"""Which target a request asks for."""

from __future__ import annotations

from explorer.spec.request import ExplorationRequest
from explorer.spec.target import BEXP, TRANSFORMERS
from workers.profiler.failures import UnsupportedTrialError
from workers.profiler.instruments import Instruments
from workers.targets.target import Target


def open_target(request: ExplorationRequest, instruments: Instruments) -> Target:
    """Open the request's target on the device of `instruments`.

    Raises:
        UnsupportedTrialError: this worker has no such target, or the target refuses the model; the message says why.
    """
    name = request.target or BEXP
    if name == BEXP:
        from workers.targets.reference.target import ReferenceTarget  # noqa: PLC0415 - brings the kernels

        return ReferenceTarget(request, instruments)
    if name == TRANSFORMERS:
        from workers.targets.transformers.target import TransformersTarget  # noqa: PLC0415 - optional library

        return TransformersTarget(request, instruments.device)
    raise UnsupportedTrialError(f"this worker has no target '{name}'; it has {BEXP} and {TRANSFORMERS}")
