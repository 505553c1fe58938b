"""A whole model that is built layer by layer, so that each can be sharded or quantised before the next is built."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from bexp.workers.targets.transformers.config import ResolvedConfig, UnsupportedModelError, quiet_library
from bexp.workers.targets.transformers.kinds import find_layers
from bexp.workers.targets.transformers.model import META, BuildSettings, build_model
from bexp.workers.targets.transformers.quantized import Quantizer

_SPREAD = 0.02  # of weights that the class itself does not initialise


def build_by_layers(
    resolved: ResolvedConfig, settings: BuildSettings, device: torch.device, take: Callable[[nn.Module], None]
) -> Any:
    """Return the whole model on `device`. `take` gets each decoder layer as soon as the layer has its weights.

    A quantised model is prepared when all of its weights exist, as after loading a checkpoint. Weights are drawn by the
    class's own `_init_weights` from `settings.seed`, so every process draws the same. They differ from those that
    `build_model` draws from this seed.

    Raises:
        UnsupportedModelError: the class fails to build, or two layers share a weight.
    """
    is_quantized = settings.quantization is not None
    model = build_model(resolved, replace(settings, prepare=None) if is_quantized else settings, META)
    quantizer = None if settings.quantization is None else Quantizer(model, settings.quantization, device)
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
            _fill(model, layer.modules(), device, quantizer)
            take(layer)
        _fill(model, shell, device, quantizer, before_drawing=model.tie_weights)
    if quantizer is not None:
        quantizer.finish()
        if settings.prepare is not None:
            with torch.random.fork_rng(devices=devices):
                torch.manual_seed(settings.seed)
                settings.prepare(model)
    return model.train(settings.training)


def _fill(
    model: Any,
    modules: Iterable[nn.Module],
    device: torch.device,
    quantizer: Quantizer | None = None,
    before_drawing: Callable[[], None] = lambda: None,
) -> None:
    """Put the modules' own tensors on `device`, initialise them, and quantise those that the quantizer has chosen."""
    chosen = list(modules)
    modules = chosen if quantizer is None else [quantizer.plain_of(module) for module in chosen]
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
    if quantizer is not None:
        quantizer.convert(chosen)
