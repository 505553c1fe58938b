"""The bytes of a quantised model's weights by kind, counted from the tensors on the device."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from bexp.explorer.model.quantization import Quantization, WeightBytes, WeightKind
from bexp.explorer.model.spelling import shortened
from bexp.out_of_memory import is_out_of_memory
from bexp.transformers.experts import expert_modules
from bexp.transformers.layers import token_mixers
from bexp.workers.instruments.failures import UnsupportedTrialError
from bexp.workers.targets.transformers.builder import PartsBuilder
from bexp.workers.targets.transformers.config import UnsupportedModelError
from bexp.workers.targets.transformers.quantized import is_quantized, own_scales, storage_bytes
from bexp.workers.targets.transformers.results import results_of

KINDS: tuple[WeightKind, ...] = ("attention", "dense MLP", "experts", "embeddings and head", "adapters", "other")
WeightsByKind = dict[WeightKind, WeightBytes]
_ADAPTER = re.compile(r"(^|\.)lora_")
_EXPERTS = re.compile(r"(^|\.)experts(\.|$)")
_ROUTER = re.compile(r"(^|\.)(gate|router)(\.|$)")


@dataclass(frozen=True, slots=True)
class PartWeights:
    """The bytes by kind of weights: of a layer of each kind, by its name, and of the part outside the layers."""

    layers: dict[str, WeightsByKind]
    shell: WeightsByKind


def count_quantized(builder: PartsBuilder, quantization: Quantization) -> PartWeights:
    """Return the bytes of the weights of a builder's parts as they are loaded, after a test of each layer.

    Raises:
        UnsupportedTrialError: the library refuses such weights, or cannot compute with them on this device.
    """
    kinds = dict.fromkeys(builder.kinds)
    try:
        skeleton = builder.skeleton
        layers = {name: _layer_weights(skeleton.layers[builder.kinds.index(name)]) for name in kinds}
        found = PartWeights(layers, _shell_weights(skeleton.model, skeleton.layers))
        for name in kinds:
            part = builder.layer(name, 1)
            for _ in range(2):  # some adapters on eight bits fail at the second pass
                results_of(part)
    except UnsupportedModelError as error:
        raise UnsupportedTrialError(str(error)) from error
    except Exception as error:  # a library refuses in ways of its own
        if is_out_of_memory(error):
            raise
        short = shortened(" ".join(str(error).split()), 200) or type(error).__name__
        raise UnsupportedTrialError(f"quantization '{quantization.name}' does not work here: {short}") from error
    return found


def _layer_weights(layer: nn.Module) -> WeightsByKind:
    """The bytes of a decoder layer's weights by kind."""
    experts = {id(part) for module in expert_modules(layer) for part in module.modules()}
    mixers = {id(part) for mixer in token_mixers(layer) for part in mixer.modules()}

    def kind_of(path: str, module: nn.Module, weight: Tensor) -> WeightKind:
        if _ADAPTER.search(path):
            return "adapters"
        if id(module) in experts or _EXPERTS.search(path):
            return "experts"
        if id(module) in mixers and weight.dim() > 1:
            return "attention"
        return "other" if weight.dim() < 2 or _ROUTER.search(path) else "dense MLP"

    return _by_kind((kind_of(path, module, weight), module, weight) for path, module, weight in _weights(layer))


def _shell_weights(model: nn.Module, layers: Iterable[nn.Module]) -> WeightsByKind:
    """The bytes of a model's weights outside its layers by kind: embeddings, head, and the rest."""
    inside = {id(weight) for layer in layers for weight in layer.parameters()}

    def kind_of(path: str, weight: Tensor) -> WeightKind:
        if _ADAPTER.search(path):
            return "adapters"
        return "embeddings and head" if weight.dim() > 1 else "other"

    outside = (entry for entry in _weights(model) if id(entry[2]) not in inside)
    return _by_kind((kind_of(path, weight), module, weight) for path, module, weight in outside)


def add_up(parts: Iterable[tuple[int, WeightsByKind]]) -> tuple[WeightBytes, ...]:
    """Return the bytes by kind of parts that occur so many times."""
    counted = list(parts)
    totals = [
        WeightBytes(
            kind=kind,
            num_bytes=sum(count * part[kind].num_bytes for count, part in counted if kind in part),
            quantized_bytes=sum(count * part[kind].quantized_bytes for count, part in counted if kind in part),
        )
        for kind in KINDS
    ]
    return tuple(total for total in totals if total.num_bytes)


def _weights(module: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Each parameter once, with its module and that module's path."""
    seen: set[int] = set()
    for path, part in module.named_modules():
        for weight in part.parameters(recurse=False):
            if id(weight) not in seen:
                seen.add(id(weight))
                yield path, part, weight


def _by_kind(weights: Iterable[tuple[WeightKind, nn.Module, Tensor]]) -> WeightsByKind:
    found: WeightsByKind = {}
    for kind, module, weight in weights:
        scales = own_scales(module) if is_quantized(weight) else []
        size = storage_bytes([weight, *scales])
        before = found.get(kind, WeightBytes(kind=kind, num_bytes=0, quantized_bytes=0))
        found[kind] = WeightBytes(
            kind=kind,
            num_bytes=before.num_bytes + size,
            quantized_bytes=before.quantized_bytes + (size if scales else 0),
        )
    return found
