"""The library for a training process: kernels, measuring, and the functions that set a model up as recommended.

The names below are loaded when they are first asked for, so that `import bexp` imports nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bexp.client.client import Client
    from bexp.config_exploration import explore_config
    from bexp.kernels.context_parallel.attention import ContextParallel
    from bexp.step.exploration import explore
    from bexp.trainer.arguments import training_arguments
    from bexp.trainer.callback import TrainerCallback
    from bexp.trainer.model_setup import apply, restore
    from bexp.trainer.muon_optimizer import muon
    from bexp.trainer.recommended_setup import RecommendedSetup
    from bexp.transformers.settings import Settings
    from bexp.tune.trainer_accumulation import check_accumulation

__all__ = [
    "Client",
    "ContextParallel",
    "RecommendedSetup",
    "Settings",
    "TrainerCallback",
    "apply",
    "check_accumulation",
    "explore",
    "explore_config",
    "muon",
    "restore",
    "training_arguments",
]

_MODULES = {  # No module has the name of a function here, because a loaded module would hide the function.
    "Client": "bexp.client.client",
    "ContextParallel": "bexp.kernels.context_parallel.attention",
    "RecommendedSetup": "bexp.trainer.recommended_setup",
    "Settings": "bexp.transformers.settings",
    "TrainerCallback": "bexp.trainer.callback",
    "apply": "bexp.trainer.model_setup",
    "check_accumulation": "bexp.tune.trainer_accumulation",
    "explore": "bexp.step.exploration",
    "explore_config": "bexp.config_exploration",
    "muon": "bexp.trainer.muon_optimizer",
    "restore": "bexp.trainer.model_setup",
    "training_arguments": "bexp.trainer.arguments",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'bexp' has no attribute '{name}'")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value
