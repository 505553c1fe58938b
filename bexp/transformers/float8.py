"""Linear layers in float8 by torchao (https://github.com/pytorch/ao, torchao.float8)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

from torch import nn

from bexp.transformers.experts import expert_modules
from bexp.transformers.layers import decoder_layers, is_layer
from bexp.transformers.settings import Float8, SettingsError
from bexp.transformers.undo import Changes

ALIGNMENT = 16
"""Float8 products need sizes that are multiples of this."""
ROUTERS = ("gate", "router")
"""Names of linear layers that choose experts; they stay precise."""


def set_float8(module: nn.Module, recipe: Float8, changes: Changes) -> None:
    """Convert the linear layers of a model's decoder layers, or of one alone; weights stay the same parameters.

    Routers, experts and modules outside the layers stay as they are. Raises SettingsError if torchao is missing, or if
    a model has nothing to convert.
    """
    try:
        torchao = import_module("torchao.float8")
    except Exception as error:  # a library that is broken in any way
        raise SettingsError(f"float8 needs torchao: pip install 'bexp[torchao]' ({error})") from error
    config = torchao.Float8LinearConfig.from_recipe_name(recipe)
    num_converted = 0
    for layer in decoder_layers(module):
        chosen = set()
        for parent, name, linear in convertible(layer):
            chosen.add(id(linear))
            changes.on_undo(partial(setattr, parent, name, linear))
        torchao.convert_to_float8_training(layer, config=config, module_filter_fn=partial(_is_among, chosen))
        num_converted += len(chosen)
    if not num_converted and not is_layer(module):
        raise SettingsError(f"{type(module).__name__} has no linear layers that float8 could compute")


def convertible(layer: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield the linear layers that are converted, each after its parent and its name there."""
    plain = {id(part) for experts in expert_modules(layer) for part in experts.modules()}
    for parent in layer.modules():
        for name, child in parent.named_children():
            if type(child) is not nn.Linear or id(child) in plain or name in ROUTERS:
                continue
            if child.in_features % ALIGNMENT == child.out_features % ALIGNMENT == 0:
                yield parent, name, child


def _is_among(chosen: set[int], module: Any, _name: str) -> bool:
    return id(module) in chosen
