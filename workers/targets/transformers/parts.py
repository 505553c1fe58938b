"""The parts of a model: the parameters of each, and the cost of a token."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, get_args

import torch
from torch import Tensor, nn

from bexp.explorer.model.model import EXPERT_COUNTS, TOP_KS
from bexp.explorer.model.parts import LayerPart, Part
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

_LINEAR_MIXER = re.compile(r".*(Linear|Lightning|Mamba|DeltaNet|ShortConv|Retention|Rwkv|LSTM|Recurrent).*")
_ATTENTION = re.compile(r".*(Attention|Attn|MLA).*")


LOGIT_BYTES, LOGIT_TRANSIENT_BYTES = 4, 8
"""For each logit, the bytes that the library's loss keeps, and the further bytes at its peak."""


def shell_part(model: Any, layers: Sequence[nn.Module], config: Any, hidden_bytes_per_token: int) -> Part:
    """Return the part outside of `layers`: embedding, norm, head. A tied head counts once, with its FLOPs."""
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    weight = getattr(model.get_output_embeddings(), "weight", None)
    return Part(
        **_sizes(parameter for parameter in model.parameters() if id(parameter) not in inside),
        flops_per_token=2.0 * weight.numel() if isinstance(weight, Tensor) else 0.0,
        saved_bytes_per_token=LOGIT_BYTES * config.vocab_size + 4 * hidden_bytes_per_token,
        transient_bytes_per_token=LOGIT_TRANSIENT_BYTES * config.vocab_size,
    )


def layer_part(
    name: str, count: int, layer: nn.Module, config: Any, *, seq_length: int, saved_bytes_per_token: float
) -> LayerPart:
    """Return one layer of a kind, which may lie on the meta device and represents `count` layers.

    Each tensor counts once. A token's FLOPs are 2 for each weight that it is multiplied with (top_k of the experts).
    Those of a sequence are attention's scores and their product with the values, causal. `saved_bytes_per_token`
    estimates the memory for the backward pass.
    """
    attention = _attention_flops(layer, config, seq_length) if has_attention(layer) else 0.0
    return LayerPart(
        name=name,
        description=f"{type(layer).__name__}, {count} times",
        has_experts=bool(expert_modules(layer)),
        **_sizes(layer.parameters()),
        flops_per_token=2.0 * sum(share * weight.numel() for weight, share in used_matrices(layer, config)),
        flops_per_sequence=attention * seq_length,
        saved_bytes_per_token=saved_bytes_per_token,
        transient_bytes_per_token=saved_bytes_per_token / 2,
    )


def _sizes(parameters: Iterable[Tensor]) -> dict[str, int]:
    """The sizes of distinct parameters, by the fields of a `Part`."""
    distinct = list({id(parameter): parameter for parameter in parameters}.values())
    return {
        "num_parameters": sum(parameter.numel() for parameter in distinct),
        "parameter_bytes": num_bytes(distinct),
        "trainable_bytes": num_bytes(parameter for parameter in distinct if parameter.requires_grad),
    }


def used_matrices(layer: nn.Module, config: Any) -> list[tuple[Tensor, float]]:
    """Return each weight of two axes or more, with the share of it that one token is multiplied with."""
    num_experts, top_k = count_experts(config)
    matrices = []
    for path, module in layer.named_modules():
        listed = num_experts > 1 and re.search(r"experts\.\d+(\.|$)", path) is not None
        for weight in module.parameters(recurse=False):
            if weight.dim() < 2:
                continue
            stacked = num_experts > 1 and weight.dim() >= 3 and weight.shape[0] == num_experts
            matrices.append((weight, top_k / num_experts if stacked or listed else 1.0))
    return matrices


def matrix_width(layer: nn.Module, config: Any) -> float:
    """Return how many numbers go in and out of a layer's matrices for one token; saved activations grow with it."""
    _, top_k = count_experts(config)
    width = 0.0
    for weight, share in used_matrices(layer, config):
        listed = share < 1.0 and weight.dim() == 2
        times = top_k if share < 1.0 and not listed else share
        width += times * (weight.shape[-1] + weight.shape[-2])
    return width


def has_attention(layer: nn.Module) -> bool:
    """Return whether a layer compares every token with every other, by the names of its classes."""
    names = [type(module).__name__ for module in layer.children()]
    names += [type(module).__name__ for child in layer.children() for module in child.children()]
    return any(_ATTENTION.fullmatch(name) and not _LINEAR_MIXER.fullmatch(name) for name in names)


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of distinct tensors."""
    unique = {id(tensor): tensor for tensor in tensors}
    return sum(tensor.numel() * tensor.element_size() for tensor in unique.values())


def dtype_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of one number."""
    return torch.empty((), dtype=dtype, device="meta").element_size()


def _attention_flops(layer: nn.Module, config: Any, seq_length: int) -> float:
    heads: int = getattr(config, "num_attention_heads", None) or 1
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope, nope = getattr(config, "qk_rope_head_dim", None), getattr(config, "qk_nope_head_dim", None)
    query_dim: int = rope + nope if rope and nope else head_dim
    value_dim: int = getattr(config, "v_head_dim", None) or head_dim
    window = _window(layer)
    # A token sees half of the sequence on average, or its window, which the first tokens do not fill.
    seen = seq_length / 2 if window is None or window >= seq_length else window - window * window / (2 * seq_length)
    return 2.0 * seen * heads * (query_dim + value_dim)


def _window(layer: nn.Module) -> int | None:
    for module in layer.modules():
        window = getattr(module, "sliding_window", None)
        if isinstance(window, int) and not isinstance(window, bool) and window > 0:
            return window
    return None


def count_experts(config: Any) -> tuple[int, int]:
    """Return the experts of a layer, and those that a token is sent to; one of each for a dense model."""
    num_experts = _first_count(config, EXPERT_COUNTS) or 1
    top_k = _first_count(config, TOP_KS) or num_experts
    return num_experts, min(top_k, num_experts)


def _first_count(config: Any, names: Sequence[str]) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if _is_count(value):
            return value
    return None


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


KINDS: tuple[WeightKind, ...] = get_args(WeightKind)
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
