"""What one batch of an evaluation needs in transformers' Trainer: a forward pass of its longest texts."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Subset

from bexp.tune.lengths import Lengths
from bexp.tune.measuring import peak_bytes, reset_peak


def describe_evaluation(trainer: Any) -> dict[str, Any] | None:
    """The longest batch that an evaluation can have; None if there is no dataset that can be read in any order."""
    dataset = _dataset(trainer)
    if dataset is None:
        return None
    return {
        "batch_size": trainer.args.per_device_eval_batch_size,
        "length": max(Lengths.of(dataset).widths, default=0),
    }


def evaluate_longest(trainer: Any) -> dict[str, float]:
    """Run that batch as `evaluate` does, with the state of the optimizer that the training has left; read the peak."""
    dataset, arguments = _dataset(trainer), trainer.args
    number = arguments.per_device_eval_batch_size * arguments.world_size
    lengths = Lengths.of(dataset)
    places = lengths.longest(number) if lengths.is_known else [place % len(dataset) for place in range(number)]
    model = trainer.model if trainer.model_wrapped is None else trainer.model_wrapped
    loss_only = arguments.prediction_loss_only or trainer.compute_metrics is None
    reset_peak(arguments.device)
    model.eval()
    for inputs in trainer.get_eval_dataloader(Subset(dataset, places)):
        trainer.prediction_step(model, inputs, loss_only)
    model.train()
    return {"peak_bytes": peak_bytes(arguments.device)[0]}


def _dataset(trainer: Any) -> Any:
    found = trainer.eval_dataset
    if isinstance(found, dict) and found:
        found = next(iter(found.values()))
    return found if hasattr(found, "__len__") and hasattr(found, "__getitem__") and len(found) else None
