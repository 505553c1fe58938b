"""The weights that a model trains and their format, compared with the measured ones, because memory depends on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bexp.trainer.recommended_setup import RecommendationError, RecommendedSetup


def refuse_another_training(model: nn.Module, setup: RecommendedSetup) -> None:
    """Raise RecommendationError if a model trains other weights than were measured, or needs more bytes for each."""
    if (adapters := adapter_difference(model, setup)) is not None:
        way = (
            "explore with training.lora"
            if setup.lora is None
            else "call peft.get_peft_model(model, ...) before bexp.apply, or explore without training.lora"
        )
        raise RecommendationError(f"{adapters}: {way}")
    if (quantized := quantization_difference(model, setup)) is not None and setup.bits is not None:
        raise RecommendationError(f"{quantized}: load it with that quantization_config, or explore with it as it is")
    difference = weight_difference(model, setup)
    if difference is not None and _itemsize(weights_dtype(model)) > _itemsize(setup.load_dtype):
        wider = "training.precision=autocast" if setup.library_code else "training.optimizer.master_dtype=float32"
        raise RecommendationError(
            f"{difference}, which need more memory: load the model with dtype=torch.{setup.load_dtype}, or explore "
            f"with {wider}"
        )


def differences_of_training(model: nn.Module, setup: RecommendedSetup) -> list[str]:
    """Return how a model's weights, and which of them are trained, differ from what was measured."""
    compared = (adapter_difference, quantization_difference, rank_difference, weight_difference)
    return [difference for compare in compared if (difference := compare(model, setup)) is not None]


def adapter_difference(model: nn.Module, setup: RecommendedSetup) -> str | None:
    """Return a text if LoRA adapters were measured and a model has none, or the reverse; else None."""
    if setup.optimizer is None or _has_adapters(model) == (setup.lora is not None):
        return None
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    share = f"{trained:,} of its {total:,} parameters"
    if setup.lora is None:
        return f"it was measured with all weights trained, and this model has adapters and trains {share}"
    rank = setup.lora.get("r")
    return (
        f"it was measured with LoRA adapters of rank {rank} on frozen weights, and this model has none and trains "
        f"{share}"
    )


def quantization_difference(model: nn.Module, setup: RecommendedSetup) -> str | None:
    """Return a text if a model's weights are quantised otherwise than was measured; else None."""
    loaded = (bits for bits in (4, 8) if getattr(model, f"is_loaded_in_{bits}bit", False))
    found = next(loaded, 0) if getattr(model, "is_quantized", False) else None
    if setup.own_code or found == setup.bits:
        return None
    measured = f"weights in {setup.bits} bits" if setup.bits else "plain weights"
    own = "are plain" if found is None else f"have {found} bits" if found and setup.bits else "are quantised"
    return f"it was measured with {measured}, and those of this model {own}"


def rank_difference(model: nn.Module, setup: RecommendedSetup) -> str | None:
    """Return a text if the adapters of a model have another rank than was measured; else None."""
    configs: Any = getattr(model, "peft_config", None)
    ranks = {rank for config in dict(configs or {}).values() if (rank := getattr(config, "r", None)) is not None}
    measured = (setup.lora or {}).get("r")
    if measured is None or not ranks or ranks == {measured}:
        return None
    return f"it was measured with adapters of rank {measured}, and those of this model have {sorted(ranks)}"


def weight_difference(model: nn.Module, setup: RecommendedSetup) -> str | None:
    """Return a text if a model's weights are in another format than was measured; else None.

    Where master weights were measured, float32 weights are as good, and so are weights whose masters an engine keeps.
    """
    found, measured = weights_dtype(model), setup.load_dtype
    same = {measured, setup.dtype, "float32"} if setup.master_weights else {measured}
    if measured is None or found is None or found in same or getattr(model, "is_quantized", False):
        return None
    less = ", which needs less memory" if _itemsize(found) < _itemsize(measured) else ""
    return f"it was measured with weights in {measured}, and those of this model are in {found}{less}"


def weights_dtype(model: nn.Module) -> str | None:
    """Return the format of a model's largest parameter, as torch names it; None without parameters."""
    largest = max(model.parameters(), key=lambda parameter: parameter.numel(), default=None)
    return None if largest is None else str(largest.dtype).removeprefix("torch.")


def _itemsize(dtype: str | None) -> int:
    return 0 if dtype is None else int(getattr(torch, dtype).itemsize)


def _has_adapters(model: nn.Module) -> bool:
    """Return whether adapters are trained on frozen weights, as peft names and configures them."""
    named = bool(getattr(model, "peft_config", None)) or any("lora_" in name for name, _ in model.named_parameters())
    return named and not all(parameter.requires_grad for parameter in model.parameters())
