"""How a training run differs from what was measured, one line for each difference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from bexp.trainer.recommended_setup import RecommendedSetup

OPTIMIZERS = {"adamw": "adamw_torch_fused", "sgd": "sgd"}
"""transformers' names of the optimizers that are measured."""
AUTOCAST_FIELDS = {"bfloat16": "bf16", "float16": "fp16"}
"""The fields of `TrainingArguments` that compute in these formats under autocast."""
CHECKPOINTING_FIELDS = ("activation_checkpointing", "gradient_checkpointing")
"""The field that recomputes every layer: its present name and the older one, which transformers 6 drops."""


def argument_differences(setup: RecommendedSetup, args: Any) -> Iterator[str]:
    """Yield how `TrainingArguments`, or TRL's, differ from what was measured; what they do not hold is not compared.

    Whether layers are recomputed is left out, because that depends on the model, too.
    """
    size = getattr(args, "per_device_train_batch_size", None)
    if size is not None and size != setup.micro_batch_size:
        yield f"micro-batches of {size} sequences, not {setup.micro_batch_size}"
    length = getattr(args, "max_length", None)  # of TRL
    if length and setup.seq_length and length != setup.seq_length:
        yield f"sequences of up to {length} tokens, not {setup.seq_length}"
    if setup.optimizer is None:
        return
    yield from _autocast_differences(setup, args)
    optimizer, measured = getattr(args, "optim", None), OPTIMIZERS[setup.optimizer]
    optimizer = getattr(optimizer, "value", optimizer)
    if optimizer is not None and optimizer != measured:
        yield f"optimizer {optimizer}, not {measured}"
    if _packs_documents(args):
        yield f"packed documents that attend to themselves alone, not {_texts(setup.padding)}"


def checkpointing_difference(setup: RecommendedSetup, run_policy: str) -> Iterator[str]:
    """Yield that a run recomputes its layers by another policy than was measured."""
    measured = setup.settings.recompute
    if setup.own_code or run_policy == measured:
        return
    if run_policy == "full":
        yield (
            f"gradient checkpointing recomputes every layer, in place of the recommended recomputation '{measured}': "
            "switch it off in TrainingArguments"
        )
    else:
        yield f"recomputation '{run_policy}', not '{measured}'"


def weight_difference(setup: RecommendedSetup, model: nn.Module) -> str | None:
    """Return that a model's weights are in another format than was measured; None if they are not.

    With measured master weights either format is as measured: an optimizer or autocast keeps the same bytes.
    """
    found, measured = weights_dtype(model), setup.load_dtype
    same = {measured, setup.dtype} if setup.master_weights else {measured}
    if measured is None or found is None or found in same or getattr(model, "is_quantized", False):
        return None
    return f"it was measured with weights in {measured}, and those of this model are in {found}"


def needs_more_bytes(setup: RecommendedSetup, model: nn.Module) -> bool:
    """Return whether a model's weights are in a wider format than was measured."""
    found, measured = weights_dtype(model), setup.load_dtype
    if found is None or measured is None:
        return False
    return bool(getattr(torch, found).itemsize > getattr(torch, measured).itemsize)


def weights_dtype(model: nn.Module) -> str | None:
    """Return the format of a model's largest parameter, as torch names it; None without parameters."""
    largest = max(model.parameters(), key=lambda parameter: parameter.numel(), default=None)
    return None if largest is None else str(largest.dtype).removeprefix("torch.")


def recomputes_layers(args: Any) -> bool:
    """Return whether the Trainer enables the library's checkpointing."""
    return any(getattr(args, name, False) for name in CHECKPOINTING_FIELDS)


def _autocast_differences(setup: RecommendedSetup, args: Any) -> Iterator[str]:
    """A trainer that keeps master weights, such as DeepSpeed, has no autocast of its own for `bf16`."""
    values = {dtype: getattr(args, field, None) for dtype, field in AUTOCAST_FIELDS.items()}
    if getattr(args, "deepspeed", None) or all(value is None for value in values.values()):
        return
    found = next((dtype for dtype, value in values.items() if value), None)
    if found != setup.autocast:
        yield f"{_autocast(found)}, not {_autocast(setup.autocast)}"


def _autocast(dtype: str | None) -> str:
    return "no autocast" if dtype is None else f"autocast of {dtype}"


def _packs_documents(args: Any) -> bool:
    """Whether TRL flattens a batch, so that each document has an attention of its own."""
    packs = getattr(args, "packing", False) and getattr(args, "packing_strategy", "bfd") != "wrapped"
    return bool(packs or getattr(args, "padding_free", False))


def _texts(padding: str | None) -> str:
    return "whole sequences" if padding in (None, "none") else f"texts that are padded {padding}"
