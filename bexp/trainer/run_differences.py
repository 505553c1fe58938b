"""How a training run differs from what was measured, as far as it is known when it begins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from bexp.trainer.argument_differences import argument_differences, recomputes_layers
from bexp.trainer.model_setup import Report, inner_model
from bexp.trainer.recommended_setup import RecommendedSetup
from bexp.trainer.trained_weights import differences_of_training
from bexp.transformers.recompute import is_checkpointing


def run_differences(setup: RecommendedSetup, args: Any, model: nn.Module | None, done: Report | None) -> Iterator[str]:
    """Yield what differs, one line each; the size and the length of micro-batches are left out, as data decide them.

    `done` is what `bexp.apply` did to `model`. Without a model, its weights and its own checkpointing are not compared.
    """
    yield from argument_differences(setup, args)
    if recomputes_layers(args):
        yield from _checkpointing_difference(setup, "full")
    elif done is not None:
        yield from _checkpointing_difference(setup, done.recommendation.settings.recompute)
    elif model is not None:
        yield from _checkpointing_difference(setup, "full" if is_checkpointing(model) else "none")
    if model is not None:
        inner = inner_model(model)
        yield from differences_of_training(inner, setup)


def _checkpointing_difference(setup: RecommendedSetup, run_policy: str) -> Iterator[str]:
    """Yield that a run recomputes its layers by another policy than was measured."""
    measured = setup.settings.recompute
    if setup.own_code or run_policy == measured:
        return
    if run_policy == "full":
        yield (
            f"gradient checkpointing recomputes every layer, in place of the recommended recomputation '{measured}': "
            "switch it off in TrainingArguments"
        )
    else:
        yield f"recomputation '{run_policy}', not '{measured}'"
