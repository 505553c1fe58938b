"""A whole model that is built layer by layer, so that each can be sharded before there is another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from bexp.workers.targets.transformers.config import ResolvedConfig, UnsupportedModelError, quiet_library
from bexp.workers.targets.transformers.kinds import find_layers
from bexp.workers.targets.transformers.model import META, BuildSettings, build_model

_SPREAD = 0.02  # of what the class itself does not initialise


def build_by_layers(
    resolved: ResolvedConfig, settings: BuildSettings, device: torch.device, take: Callable[[nn.Module], None]
) -> Any:
    """Return the whole model on `device`. `take` is given each decoder layer as soon as its weights are there.

    Weights are drawn by the class's own `_init_weights` from `settings.seed`, so every process draws the same. They
    are not those that `build_model` draws from this seed. UnsupportedModelError if the class fails to build, or if two
    layers share a weight.
    """
    model = build_model(resolved, settings, META)
    layers = find_layers(model)
    inside = [id(module) for layer in layers for module in layer.modules()]
    weights = [id(weight) for layer in layers for weight in layer.parameters()]
    if len(set(inside)) < len(inside) or len(set(weights)) < len(weights):
        raise UnsupportedModelError(f"layers of {type(model).__name__} share weights, so they cannot be sharded")
    shell = [module for module in model.modules() if id(module) not in set(inside)]
    devices = [device] if device.type == "cuda" else []
    with quiet_library(), torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.manual_seed(settings.seed)
        for layer in layers:
            _fill(model, layer.modules(), device)
            take(layer)
        _fill(model, shell, device, before_drawing=model.tie_weights)
    return model.train(settings.training)


def _fill(
    model: Any,
    modules: Iterable[nn.Module],
    device: torch.device,
    before_drawing: Callable[[], None] = lambda: None,
) -> None:
    """Put the modules' own tensors on `device`, and initialise them."""
    modules = list(modules)
    for module in modules:
        module.to_empty(device=device, recurse=False)
    before_drawing()
    for module in modules:
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            if tensor.is_floating_point():
                tensor.normal_(0.0, _SPREAD)
            else:
                tensor.zero_()
    for module in modules:
        model._init_weights(module)
