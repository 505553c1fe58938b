"""The figures of a model's parts: how often each occurs, its parameters, and what a token costs there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

_LINEAR_MIXER = re.compile(r".*(Linear|Lightning|Mamba|DeltaNet|ShortConv|Retention|Rwkv|LSTM|Recurrent).*")
_ATTENTION = re.compile(r".*(Attention|Attn|MLA).*")
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts")


@dataclass(frozen=True)
class KindFigures:
    """One kind of layer; a token's figures are for one layer and one forward pass.

    indices:               the places of its layers in the model
    num_parameters:        of one layer, each tensor once
    parameter_bytes:       of one layer, on its device
    flops_per_token:       2 for each weight that a token is multiplied with (top_k of the experts)
    attention_flops_per_token: of the scores and their product with the values, causal, at the sequence length
    saved_bytes_per_token: an estimate of what the backward pass keeps: the tiny layer's count, scaled by the widths of
                           the matrices; it serves to leave out what cannot fit, and is generous to neither side
    hidden_bytes_per_token: of the hidden states at the layer's border
    """

    name: str
    class_name: str
    indices: tuple[int, ...]
    num_parameters: int
    num_trainable_parameters: int
    parameter_bytes: int
    trainable_bytes: int
    flops_per_token: float
    attention_flops_per_token: float
    saved_bytes_per_token: float | None
    hidden_bytes_per_token: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"indices": list(self.indices), "count": len(self.indices)}


@dataclass(frozen=True)
class ShellFigures:
    """What is outside the layers: embedding, norm, head."""

    num_parameters: int
    num_trainable_parameters: int
    parameter_bytes: int
    trainable_bytes: int
    vocab_size: int
    tied_weights: bool
    flops_per_token: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def shell_figures(model: Any, layers: Sequence[nn.Module], config: Any) -> ShellFigures:
    """The figures of `model` without `layers`; a tied head is counted once, and its FLOPs are counted."""
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    outside = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    weight = getattr(head, "weight", None)
    return ShellFigures(
        num_parameters=_numel(outside),
        num_trainable_parameters=_numel(parameter for parameter in outside if parameter.requires_grad),
        parameter_bytes=num_bytes(outside),
        trainable_bytes=num_bytes(parameter for parameter in outside if parameter.requires_grad),
        vocab_size=int(config.vocab_size),
        tied_weights=weight is not None and weight is getattr(embedding, "weight", None),
        flops_per_token=2.0 * weight.numel() if isinstance(weight, Tensor) else 0.0,
    )


def kind_figures(
    name: str,
    indices: Sequence[int],
    layer: nn.Module,
    config: Any,
    *,
    seq_length: int,
    saved_bytes_per_token: float | None,
    hidden_bytes_per_token: int,
) -> KindFigures:
    """The figures of `layer`, which stands for the layers of its kind and may lie on the meta device."""
    parameters = list(layer.parameters())
    attention = 0.0 if not has_attention(layer) else _attention_flops(layer, config, seq_length)
    return KindFigures(
        name=name,
        class_name=type(layer).__name__,
        indices=tuple(indices),
        num_parameters=_numel(parameters),
        num_trainable_parameters=_numel(parameter for parameter in parameters if parameter.requires_grad),
        parameter_bytes=num_bytes(parameters),
        trainable_bytes=num_bytes(parameter for parameter in parameters if parameter.requires_grad),
        flops_per_token=2.0 * sum(share * weight.numel() for weight, share in used_matrices(layer, config)),
        attention_flops_per_token=attention,
        saved_bytes_per_token=saved_bytes_per_token,
        hidden_bytes_per_token=hidden_bytes_per_token,
    )


def used_matrices(layer: nn.Module, config: Any) -> list[tuple[Tensor, float]]:
    """Each weight of two axes or more, with the share of it that one token is multiplied with."""
    num_experts, top_k = _experts(config)
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
    """The numbers that go in and out of a layer's matrices for one token; saved activations grow with it."""
    _, top_k = _experts(config)
    width = 0.0
    for weight, share in used_matrices(layer, config):
        listed = share < 1.0 and weight.dim() == 2
        times = top_k if share < 1.0 and not listed else share
        width += times * (weight.shape[-1] + weight.shape[-2])
    return width


def has_attention(layer: nn.Module) -> bool:
    """Whether a layer compares every token with every other, by the names of its classes."""
    names = [type(module).__name__ for module in layer.children()]
    names += [type(module).__name__ for child in layer.children() for module in child.children()]
    return any(_ATTENTION.fullmatch(name) and not _LINEAR_MIXER.fullmatch(name) for name in names)


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of distinct tensors."""
    unique = {id(tensor): tensor for tensor in tensors}
    return sum(tensor.numel() * tensor.element_size() for tensor in unique.values())


def dtype_bytes(dtype: torch.dtype) -> int:
    """Bytes of one number."""
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


def _experts(config: Any) -> tuple[int, int]:
    num_experts = _first_count(config, _NUM_EXPERTS) or 1
    top_k = _first_count(config, _TOP_K) or num_experts
    return num_experts, min(top_k, num_experts)


def _first_count(config: Any, names: Sequence[str]) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if _is_count(value):
            return value
    return None


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _numel(tensors: Iterable[Tensor]) -> int:
    unique = {id(tensor): tensor for tensor in tensors}
    return sum(tensor.numel() for tensor in unique.values())
