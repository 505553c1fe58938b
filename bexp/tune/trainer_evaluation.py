"""What one batch of an evaluation needs in transformers' Trainer: a forward pass of its longest texts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Subset

from bexp.tune.lengths import Lengths
from bexp.tune.measuring import peak_bytes, reset_peak


def describe_evaluation(trainer: Any) -> dict[str, Any] | None:
    """The longest batch that an evaluation can have; None if there is no dataset that can be read in any order."""
    found = _datasets(trainer)
    if not found:
        return None
    return {
        "batch_size": trainer.args.per_device_eval_batch_size,
        "length": max(max(lengths.widths, default=0) for _, lengths in found),
    }


def evaluate_longest(trainer: Any) -> dict[str, float]:
    """Run that batch as `evaluate` does, with the state of the optimizer that the training has left; read the peak.

    For `compute_metrics` the Trainer keeps the outputs of all batches on the device, which are added. If there are
    several datasets, each is evaluated by itself, and the highest of their peaks counts.
    """
    return {"peak_bytes": max(_peak(trainer, dataset, lengths) for dataset, lengths in _datasets(trainer))}


def _peak(trainer: Any, dataset: Any, lengths: Lengths) -> float:
    arguments = trainer.args
    number = arguments.per_device_eval_batch_size * arguments.world_size
    places = lengths.longest(number) if lengths.is_known else [place % len(dataset) for place in range(number)]
    model = trainer.model if trainer.model_wrapped is None else trainer.model_wrapped
    loss_only = arguments.prediction_loss_only or trainer.compute_metrics is None
    reset_peak(arguments.device)
    model.eval()
    kept = 0
    for inputs in trainer.get_eval_dataloader(Subset(dataset, places)):
        _, logits, labels = trainer.prediction_step(model, inputs, loss_only)
        kept = max(kept, _kept_bytes(trainer, logits, labels, math.ceil(len(dataset) / number)))
    model.train()
    return peak_bytes(arguments.device)[0] + kept


def _kept_bytes(trainer: Any, logits: Any, labels: Any, num_batches: int) -> int:
    """Bytes of the outputs of other batches, if all are as long; a second copy is there while they are put together."""
    arguments = trainer.args
    if logits is not None and trainer.preprocess_logits_for_metrics is not None:
        logits = trainer.preprocess_logits_for_metrics(logits, labels)
    if getattr(arguments, "batch_eval_metrics", False):  # metrics take each batch, and nothing is kept
        return 0
    batches = min(num_batches, arguments.eval_accumulation_steps or num_batches)
    copies = 2 if getattr(arguments, "eval_do_concat_batches", True) else 1
    one = sum(tensor.numel() * tensor.element_size() for tensor in _tensors((logits, labels)))
    return copies * (batches - 1) * one * int(arguments.world_size)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)


def _datasets(trainer: Any) -> list[tuple[Any, Lengths]]:
    """The datasets that can be read in any order, each with the lengths of its samples."""
    found = trainer.eval_dataset
    each = found.values() if isinstance(found, dict) else [found]
    readable = [one for one in each if hasattr(one, "__len__") and hasattr(one, "__getitem__") and len(one)]
    return [(one, Lengths.of(one)) for one in readable]
