"""A model's decoder layers, and the modules in them that mix tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

_MIXERS = frozenset(
    {"self_attn", "attention", "attn", "self_attention", "linear_attn", "mixer", "temporal_block", "mamba", "conv"}
)
"""Names that transformers gives to the part of a layer that mixes tokens."""
DEPTH_NAMES = re.compile(
    r"num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers|num_(en|de)coder_layers|num_blocks|num_layers_per_stack"
)
"""Names that configurations have for their number of layers."""
_OTHER_TOWER = re.compile(r".*(Vision|Image|Audio|Speech|Siglip).*(Model|Encoder|Tower|Embedding|Transformer)")


def configurations(module: nn.Module) -> list[Any]:
    """The different configuration objects of the modules in `module`, each once."""
    configs: dict[int, Any] = {}
    for part in module.modules():
        config = getattr(part, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            configs.setdefault(id(config), config)
            text = config.get_text_config() if hasattr(config, "get_text_config") else config
            configs.setdefault(id(text), text)
    return list(configs.values())


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """The decoder layers of a causal language model, in the order in which it holds them; `module` if it is one layer.

    They are the outermost list with as many modules as the configuration has layers. If several lists have, the one
    with the most parameters counts. Otherwise they are the siblings among the outermost modules that transformers can
    checkpoint. Towers for images and sound are passed over. The result is empty if there are none.
    """
    if is_layer(module):
        return [module]
    depths = {config_depth(config) for config in _own_configurations(module)}
    lists = _outermost(module, lambda part: isinstance(part, nn.ModuleList) and len(part) in depths)
    if lists:
        return list(max(lists, key=_num_parameters).children())
    layers = {id(layer) for layer in _outermost(module, is_layer)}
    parents = [parent for parent in module.modules() if any(id(child) in layers for child in parent.children())]
    if not parents:
        return []
    return [child for child in max(parents, key=_num_parameters).children() if id(child) in layers]


def config_depth(config: Any) -> int | None:
    """The number of decoder layers that a configuration states; None if it states none."""
    text_config = config.get_text_config(decoder=True)
    depth = getattr(text_config, "num_hidden_layers", None)
    return depth if isinstance(depth, int) else depth_of(text_config.to_dict())


def depth_of(values: Mapping[str, Any]) -> int | None:
    """The number of layers that a configuration's values state at their top level; None if they state none."""
    named = (value for name, value in values.items() if DEPTH_NAMES.fullmatch(name))
    return next((value for value in named if isinstance(value, int) and not isinstance(value, bool)), None)


def is_layer(module: nn.Module) -> bool:
    """Return whether transformers treats `module` as one layer."""
    from transformers.modeling_layers import GradientCheckpointingLayer  # noqa: PLC0415 - optional

    return isinstance(module, GradientCheckpointingLayer)


def token_mixers(layer: nn.Module) -> list[nn.Module]:
    """The parts of a layer that mix the tokens of a sequence: attention, or what a recurrent layer has instead."""
    named = [child for name, child in layer.named_children() if name in _MIXERS]
    return named or [child for child in layer.children() if "Attention" in type(child).__name__]


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _own_configurations(module: nn.Module) -> list[Any]:
    """The configuration of the model itself; those of its parts if it is wrapped in a module without one."""
    config = getattr(module, "config", None)
    return [config] if hasattr(config, "get_text_config") else configurations(module)


def _outermost(module: nn.Module, matches: Callable[[nn.Module], bool]) -> list[nn.Module]:
    if _OTHER_TOWER.fullmatch(type(module).__name__):
        return []
    if matches(module):
        return [module]
    return [outermost for child in module.children() for outermost in _outermost(child, matches)]
