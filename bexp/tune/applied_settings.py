"""What `bexp.apply` can do to the model of a Trainer, as values of a setting that is tried beside the size."""

from __future__ import annotations

from typing import Any

import torch

from bexp.trainer.model_setup import apply, inner_model
from bexp.trainer.recommended_setup import RecommendedSetup
from bexp.transformers.set_up import set_up
from bexp.transformers.settings import SettingsError
from bexp.tune.placeholders import APPLIED, APPLY, settings_of


def usable(model: Any) -> list[str]:
    """The values to try: none, all kernels that this model passes the checks of, and these with compiled layers.

    Layers are compiled where a GPU takes it.
    """
    kernels = [name for name in APPLIED if name != "compile" and _passes(model, name)]
    values = ["none", "+".join(kernels)] if kernels else ["none"]
    return [*values, "+".join([*kernels, "compile"])] if torch.cuda.is_available() else values


def apply_choice(model: Any, choice: dict[str, Any], size: int) -> None:
    """Set up a model as a trial or an answer says, by `bexp.apply`."""
    value = choice.get(APPLY, "none")
    if value != "none":
        apply(model, RecommendedSetup(settings_of(value), micro_batch_size=size))


def _passes(model: Any, name: str) -> bool:
    try:
        set_up(inner_model(model), settings_of(name)).undo()
    except SettingsError:
        return False
    return True
