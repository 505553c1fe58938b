"""Finds a model's decoder layers, and the modules in them that mix tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

_MIXERS = frozenset(
    {"self_attn", "attention", "attn", "self_attention", "linear_attn", "mixer", "temporal_block", "mamba", "conv"}
)
"""Names that transformers gives to the part of a layer that mixes tokens."""


def configurations(module: nn.Module) -> list[Any]:
    """The different configuration objects of the modules in `module`, each once."""
    found: dict[int, Any] = {}
    for part in module.modules():
        config = getattr(part, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            found.setdefault(id(config), config)
            text = config.get_text_config() if hasattr(config, "get_text_config") else config
            found.setdefault(id(text), text)
    return list(found.values())


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """The decoder layers of a model in order; `module` itself if it is one layer.

    They are the outermost list with as many modules as the configuration has layers; if there are several such lists,
    the one with the most parameters. Otherwise they are the outermost modules that transformers can checkpoint. The
    result is empty if there are none.
    """
    if is_layer(module):
        return [module]
    wanted = {getattr(config, "num_hidden_layers", None) for config in configurations(module)}
    lists = [found for found in _outermost_lists(module) if len(found) in wanted]
    if lists:
        largest: nn.ModuleList = max(lists, key=_num_parameters)
        return list(largest)
    return list(_outermost_layers(module))


def is_layer(module: nn.Module) -> bool:
    """Whether transformers treats `module` as one layer."""
    from transformers.modeling_layers import GradientCheckpointingLayer  # noqa: PLC0415 - optional

    return isinstance(module, GradientCheckpointingLayer)


def token_mixers(layer: nn.Module) -> list[nn.Module]:
    """The parts of a layer that mix the tokens of a sequence: attention, or what a recurrent layer has instead."""
    named = [child for name, child in layer.named_children() if name in _MIXERS]
    return named or [child for child in layer.children() if "Attention" in type(child).__name__]


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _outermost_lists(child)


def _outermost_layers(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if is_layer(child):
            yield child
        else:
            yield from _outermost_layers(child)
