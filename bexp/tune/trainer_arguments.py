"""TrainingArguments that take their sizes only when they are made."""

from __future__ import annotations

from typing import Any

FIXED_SIZES = (
    "takes its sizes when TrainingArguments are made: put {micro_batch_size} and {grad_accum_steps} where the command "
    "takes them"
)


def owner_of_sizes(arguments: Any) -> str | None:
    """Return the class that has already computed values from the sizes of these arguments; None if they can be set."""
    if getattr(arguments, "hf_deepspeed_config", None) is not None:
        return "DeepSpeed"
    return type(arguments).__name__ if hasattr(arguments, "steps_per_generation") else None  # TRL's GRPO and RLOO
