"""How the measured model was trained: number formats, adapters, optimizer, and what becomes of texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bexp.explorer.model.quantization import quantization_of


def is_library_code(request: Mapping[str, Any]) -> bool:
    """Return whether the transformers library's own classes were measured; a person's target may take a config, too."""
    return request.get("hf_config") is not None and request.get("target") in (None, "transformers")


def quantized_bits(request: Mapping[str, Any]) -> int | None:
    """Return the bits of the quantised weights that were measured, 4 or 8; None for plain ones."""
    quantized = quantization_of(request.get("quantization"), request.get("hf_config"))
    return None if quantized is None else quantized.bits


def read_training(request: Mapping[str, Any], dtype: str | None, *, own_code: bool) -> dict[str, Any]:
    """Return the fields of `RecommendedSetup` that say how the measured model was trained.

    They are empty for a person's own code, which decides all of that, and for a document without a request. `dtype` is
    the format of the matrix products, where the recommendation has it.
    """
    library = is_library_code(request)
    weights: str | None
    if own_code or not (library or request.get("model") is not None):
        return {}
    training = request.get("training") or {}
    optimizer = training.get("optimizer") or {}
    precision = training.get("precision") or "pure"
    if library:  # bfloat16 is the format of the weights, of autocast, or of both
        weights = "float32" if precision == "autocast" else "bfloat16"
        autocast = "bfloat16" if precision in ("autocast", "upcast") or training.get("lora") else None
        master = precision == "master"
    else:
        weights = dtype or (request.get("model") or {}).get("dtype")
        master = weights != "float32" and optimizer.get("master_dtype", "float32") is not None
        autocast = weights if master else None  # a Trainer has no master weights, and the same bytes under autocast
    return {
        "dtype": weights,
        "autocast": autocast,
        "master_weights": master,
        "lora": training.get("lora"),
        "bits": quantized_bits(request) if library else None,
        "optimizer": optimizer.get("name", "adamw"),
        "batching": _batching(request) if library else None,
    }


def _batching(request: Mapping[str, Any]) -> str:
    return "full" if request.get("lengths") is None else request.get("batching") or "padded"
