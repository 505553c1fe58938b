"""What frameworks exchange at other times than was measured, in lines of an export's header.

Measured with ZeRO-2, parameters are gathered once a step. Measured without sharding, gradients are reduced once a step,
while the last backward goes on: see `bexp.explorer.cost.collectives`.
"""

from __future__ import annotations

from bexp.explorer.exports.trainer_settings import TrainerSettings
from bexp.explorer.model.training import Sharding


def gathering_notes(settings: TrainerSettings) -> list[str]:
    """Return what FSDP adds to a step with ZeRO-2: it shards the parameters again after each backward."""
    if settings.sharding is not Sharding.ZERO2 or settings.grad_accum_steps == 1:
        return []
    return ["communication: parameters are gathered in each accumulation step, and not once a step as measured"]


def reduces_each_batch(settings: TrainerSettings) -> bool:
    """Whether gradients are reduced in each accumulation step, as measured with ZeRO-2 and ZeRO-3.

    accelerate and transformers' Trainer reduce them in the last one alone unless they are told so (`sync_each_batch`),
    and then hold whole gradients until there.
    """
    return settings.sharding in (Sharding.ZERO2, Sharding.ZERO3) and settings.grad_accum_steps != 1
