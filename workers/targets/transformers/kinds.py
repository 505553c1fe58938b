"""The layers among a model's modules, and the kinds of layers that are alike."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

from torch import nn

from bexp.transformers.layers import decoder_layers
from bexp.workers.targets.transformers.config import UnsupportedModelError, is_int

_OWN_NUMBER = re.compile(r".*(layer|block|depth).*(idx|ids?|index|number|num)|idx|layer")


def find_layers(model: Any) -> list[nn.Module]:
    """Return the decoder layers of a causal language model in order. Raises UnsupportedModelError if there is none."""
    layers = decoder_layers(model)
    if not layers:
        raise UnsupportedModelError(f"no list of layers was found in {type(model).__name__}")
    return layers


def kind_names(layers: Sequence[nn.Module], config: Any) -> list[str]:
    """Return the kind of each layer, by a name: layers with the same name cost the same.

    Layers are alike if their class, the shapes of parameters and buffers, and the switches inside the modules agree. So
    must the entries of the configuration's lists by layer, such as `layer_types`. Numbers that merely count the layers,
    and factors that depend on the depth, do not matter.
    """
    keys = _keys(layers, config)
    order = list(dict.fromkeys(keys))
    labels = {key: _label(layers[keys.index(key)], keys.index(key), config) for key in order}
    repeated = Counter(labels.values())
    seen: Counter[str] = Counter()
    for key in order:
        label = labels[key]
        if repeated[label] > 1:
            seen[label] += 1
            labels[key] = f"{label}#{seen[label]}"
    return [labels[key] for key in keys]


def _keys(layers: Sequence[nn.Module], config: Any) -> list[Hashable]:
    shapes = [(type(layer).__qualname__, _shapes(layer)) for layer in layers]
    by_shape: dict[Hashable, list[int]] = defaultdict(list)
    for index, shape in enumerate(shapes):
        by_shape[shape].append(index)
    switches: dict[int, Hashable] = {}
    for indices in by_shape.values():
        attributes = {index: _attributes(layers[index]) for index in indices}
        counting = _counting(list(attributes.values()))
        for index in indices:
            kept = ((name, value) for name, value in attributes[index].items() if name not in counting)
            switches[index] = tuple(sorted(kept, key=str))
    return [(shapes[i], _config_entries(config, i, len(layers)), switches[i]) for i in range(len(layers))]


def _counting(attributes: list[dict[str, Hashable]]) -> set[str]:
    """Names of whole numbers that differ in every layer, because they number the layers."""
    if len(attributes) < 2:
        return set()
    names = set().union(*attributes)
    values = {name: [one.get(name) for one in attributes] for name in names}
    return {name for name, by_layer in values.items() if is_int(by_layer[0]) and len(set(by_layer)) == len(by_layer)}


def _attributes(layer: nn.Module) -> dict[str, Hashable]:
    attributes: dict[str, Hashable] = {}
    for path, module in layer.named_modules():
        for name, value in vars(module).items():
            if name.startswith("_") or _OWN_NUMBER.fullmatch(name):
                continue
            if value is None or isinstance(value, (bool, str, int)):
                attributes[f"{path}.{name}"] = value
    return attributes


def _shapes(layer: nn.Module) -> Hashable:
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    modules = tuple(type(module).__qualname__ for module in layer.modules())
    return modules, tuple((name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors)


def _config_entries(config: Any, index: int, count: int) -> Hashable:
    entries = []
    for name, value in config.to_dict().items():
        if isinstance(value, (list, tuple)) and len(value) == count and isinstance(value[index], (bool, str, int)):
            entries.append((name, value[index]))
    return tuple(entry for entry in entries if not _OWN_NUMBER.fullmatch(entry[0]))


def _label(layer: nn.Module, index: int, config: Any) -> str:
    layer_types = getattr(config, "layer_types", None)
    if isinstance(layer_types, (list, tuple)) and index < len(layer_types) and len(set(layer_types)) > 1:
        return f"{type(layer).__name__}[{layer_types[index]}]"
    return type(layer).__name__
