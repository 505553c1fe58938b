"""Fields of transformers' `TrainingArguments`, as JSON for `TrainingArguments(**fields)` or `HfArgumentParser`.

Names as of transformers 5.23. What belongs to the model, to its data or to peft stands in the header.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.exports.document import ExportDocument, json_export
from bexp.explorer.exports.script import length_notes, model_notes
from bexp.explorer.exports.sharding_communication import gathering_notes, reduces_each_batch
from bexp.explorer.exports.trainer_settings import TrainerSettings
from bexp.explorer.model.optimizers import LIBRARY_ARGUMENTS, LIBRARY_NAMES
from bexp.explorer.model.training import Sharding
from bexp.explorer.trainers.trainer import HALF_NAMES

EVERY_NTH_LAYER = {Recompute.FULL: 1, Recompute.PARTIAL_50: 2, Recompute.PARTIAL_25: 4}
"""The policies that recompute one layer of every so many."""


def render(
    settings: TrainerSettings, others: Mapping[str, Any] | None = None, notes: Iterable[str] = ()
) -> ExportDocument:
    """Return the JSON, with the fields `others` and the `notes` of a trainer that is built on this one.

    `torch_compile` is off, because it compiles the whole model and no export asks for that.
    """
    values: dict[str, Any] = {
        **batch_fields(settings),
        "auto_find_batch_size": False,
        "torch_compile": False,
        **optimizer_fields(settings),
        **precision_fields(settings),
        **_recompute_fields(settings),
        **sharding_fields(settings),
        **order_fields(settings),
        **(others or {}),
    }
    if settings.device_kind == "cpu":
        values["use_cpu"] = True
    own = [*model_notes(settings), *length_notes(settings), *gathering_notes(settings)]
    return json_export(settings, values, [*own, *notes])


def batch_fields(settings: TrainerSettings) -> dict[str, Any]:
    """Return the micro-batch, and the accumulation if a batch is stated."""
    fields = {"per_device_train_batch_size": settings.micro_batch_size}
    if settings.grad_accum_steps is not None:
        fields["gradient_accumulation_steps"] = settings.grad_accum_steps
    return fields


def optimizer_fields(settings: TrainerSettings, field: str = "optim") -> dict[str, Any]:
    """Return the optimizer that was measured, with its momentum; none for a person's own code."""
    if settings.is_own_code:
        return {}
    arguments = LIBRARY_ARGUMENTS.get(settings.optimizer)
    return {field: LIBRARY_NAMES[settings.optimizer], **({} if arguments is None else {"optim_args": arguments})}


def model_fields(settings: TrainerSettings) -> dict[str, Any]:
    """Return the arguments of the model, without those that the library chooses by itself."""
    fields = {"attn_implementation": settings.attention, "experts_implementation": settings.experts}
    return {name: value for name, value in fields.items() if value is not None}


def precision_fields(settings: TrainerSettings) -> dict[str, Any]:
    """Return the field that computes under autocast; none if the weights are in the format of the products."""
    return {HALF_NAMES[settings.dtype]: True} if settings.has_autocast else {}


def order_fields(settings: TrainerSettings) -> dict[str, Any]:
    """Return the field that groups texts by length. Since transformers 5.2 there is no `group_by_length` by itself."""
    return {"train_sampling_strategy": "group_by_length"} if settings.batching == "grouped" else {}


def sharding_fields(settings: TrainerSettings) -> dict[str, Any]:
    """Return the fields of FSDP2; `zero2` keeps the parameters whole after forward. FSDP recomputes layers itself."""
    if settings.sharding is Sharding.NONE:
        return {}
    config = {"version": 2, "reshard_after_forward": settings.sharding is Sharding.ZERO3}
    if settings.recompute is Recompute.FULL:
        config["activation_checkpointing"] = True
    fields: dict[str, Any] = {"fsdp": True, "fsdp_config": config}
    if reduces_each_batch(settings):
        fields["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    return fields


def _recompute_fields(settings: TrainerSettings) -> dict[str, Any]:
    every = EVERY_NTH_LAYER.get(settings.recompute)
    if every is None or (every == 1 and settings.sharding is not Sharding.NONE):
        return {"activation_checkpointing": False}
    arguments: dict[str, Any] = {"use_reentrant": False}
    if every > 1:
        arguments["every_n_layers"] = every
    return {"activation_checkpointing": True, "activation_checkpointing_kwargs": arguments}
