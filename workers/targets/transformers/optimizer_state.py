"""What an optimizer of a library keeps, read from the real one after a step."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bexp.explorer.model.parts import ModelParts
from bexp.explorer.model.spelling import shortened
from bexp.workers.instruments.failures import UnsupportedTrialError
from bexp.workers.targets.target import OptimizerPart
from bexp.workers.targets.transformers.host_memory import full_host
from bexp.workers.targets.transformers.training_run import TrainerOptimizer


def with_optimizer_state(parts: ModelParts, name: str, optimizers: Iterable[OptimizerPart]) -> ModelParts:
    """Return a model's parts with the bytes after a step of each of `optimizers`, as often as the model has it.

    Raises:
        UnsupportedTrialError: the optimizer does not work here, or the host cannot hold what it keeps there.
    """
    on_device = on_host = 0
    for part in optimizers:
        try:
            optimizer = part.build()
            assert isinstance(optimizer, TrainerOptimizer), "this target makes no other"
            with torch.compiler.set_stance("force_eager"):  # compiled code has the same state, after seconds
                optimizer.step()
        except UnsupportedTrialError:
            raise
        except Exception as error:  # a library that is broken in any way
            short = shortened(" ".join(str(error).split()), 200) or type(error).__name__
            raise UnsupportedTrialError(f"optimizer '{name}' does not work here: {short}") from error
        on_device += part.count * optimizer.state_bytes
        on_host += part.count * optimizer.host_bytes
        for parameter in optimizer.parameters:
            parameter.grad = None
    if on_host and (reason := full_host(on_host, f"optimizer '{name}' needs")) is not None:
        raise UnsupportedTrialError(reason)
    return parts.model_copy(update={"optimizer_state_bytes": on_device, "optimizer_host_bytes": on_host or None})
