"""Differences of `TrainingArguments` from what was measured, one line each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bexp.explorer.model.optimizers import ALIASES, LIBRARY_NAMES
from bexp.explorer.trainers.document import HALF_NAMES
from bexp.trainer.recommended_setup import RecommendedSetup

CHECKPOINTING_FIELDS = ("activation_checkpointing", "gradient_checkpointing")
"""The field that recomputes every layer: its present name and the older one, which transformers 6 drops."""


def size_difference(setup: RecommendedSetup, micro_batch_size: int) -> Iterator[str]:
    """Yield a line if a run has micro-batches of another size than was measured."""
    if micro_batch_size != setup.micro_batch_size:
        yield f"micro_batch_size {micro_batch_size}, not the recommended {setup.micro_batch_size}"


def length_difference(setup: RecommendedSetup, length: int | None) -> Iterator[str]:
    """Yield a line if the longest sequences have another length than was measured; `length` is None if not known.

    Where texts of unequal length were measured, a run's longest text may be shorter.
    """
    if not length or not setup.seq_length:
        return
    varies = setup.batching not in (None, "full")
    if length > setup.seq_length or (length < setup.seq_length and not varies):
        yield f"sequences of up to {length} tokens, not {setup.seq_length}"


def argument_differences(setup: RecommendedSetup, args: Any) -> Iterator[str]:
    """Yield how `TrainingArguments`, or TRL's, differ from what was measured. Missing fields are not compared.

    The size of a micro-batch is left out, because the Trainer may find another. So are its length, which the data
    limit, and recomputation, which depends on the model.
    """
    if setup.optimizer is None:
        return
    yield from _autocast_differences(setup, args)
    optimizer = getattr(args, "optim", None)
    optimizer, measured = getattr(optimizer, "value", optimizer), LIBRARY_NAMES.get(setup.optimizer)
    meant = ALIASES.get(str(optimizer), optimizer)
    if measured is None:  # the arguments do not say which the Trainer was given
        clipped_at = getattr(args, "max_grad_norm", 0.0)
        if setup.has_host_optimizer and clipped_at:
            yield f"gradients are clipped at {clipped_at}, which the measured optimizer never sees"
    elif optimizer is not None and measured not in (optimizer, meant):  # AdamW that is not fused is another one
        yield f"optimizer {optimizer}, not {measured}"
    yield from _text_differences(setup, args)


def recomputes_layers(args: Any) -> bool:
    """Return whether the Trainer enables the library's checkpointing."""
    return any(getattr(args, name, False) for name in CHECKPOINTING_FIELDS)


def _autocast_differences(setup: RecommendedSetup, args: Any) -> Iterator[str]:
    if setup.master_weights and setup.autocast is None:
        return  # an engine such as DeepSpeed's computes in the format of the weights, whatever `bf16` says
    values = {dtype: getattr(args, field, None) for dtype, field in HALF_NAMES.items()}
    if all(value is None for value in values.values()):
        return
    found = next((dtype for dtype, value in values.items() if value), None)
    if found != setup.autocast:
        yield f"products are computed {_autocast(found)}, and were measured {_autocast(setup.autocast)}"


def _autocast(dtype: str | None) -> str:
    return "without autocast" if dtype is None else f"under autocast of {dtype}"


def _text_differences(setup: RecommendedSetup, args: Any) -> Iterator[str]:
    if _packs_documents(args):
        if setup.batching != "packed":
            yield f"{_texts('packed')}, not {_texts(setup.batching)}"
    elif getattr(args, "padding_free", False):
        yield f"documents in one row without padding, as many as a micro-batch has, not {_texts(setup.batching)}"
    elif setup.batching == "packed" and hasattr(args, "packing"):
        yield f"{_texts('padded')}, not {_texts('packed')}"
    order = _order(args)
    is_measured = order == "group_by_length" if setup.batching == "grouped" else order != "group_by_length"
    if order is not None and setup.batching in ("padded", "grouped") and not is_measured:
        yield f"texts in the order '{order}', and {setup.batching} ones were measured"


def _packs_documents(args: Any) -> bool:
    """Return whether TRL packs whole documents, each of which has an attention of its own."""
    return bool(getattr(args, "packing", False) and getattr(args, "packing_strategy", "bfd") != "wrapped")


def _order(args: Any) -> str | None:
    """Return the order of texts; transformers before 5.2 has a field of its own for those grouped by length."""
    grouped = getattr(args, "group_by_length", None)
    older = None if grouped is None else "group_by_length" if grouped else "random"
    return getattr(args, "train_sampling_strategy", None) or older


def _texts(batching: str | None) -> str:
    if batching == "packed":
        return "packed documents that attend to themselves alone"
    if batching == "token_budget":
        return "whole texts in one row, up to a number of tokens"
    return "whole sequences" if batching in (None, "full") else "texts that are padded"
