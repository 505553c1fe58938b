"""A recommendation as fields of transformers' `TrainingArguments`."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from bexp.explorer.model.optimizers import LIBRARY, LIBRARY_ARGUMENTS, LIBRARY_NAMES
from bexp.explorer.trainers.document import HALF_NAMES
from bexp.explorer.trainers.trl import OWN_LOSS
from bexp.trainer.argument_differences import (
    CHECKPOINTING_FIELDS,
    argument_differences,
    length_difference,
    recomputes_layers,
    size_difference,
)
from bexp.trainer.recommended_setup import RecommendedSetup, Source

_LOGGER = logging.getLogger(__name__)
_SIZE, _ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"
_SAME = (
    frozenset(HALF_NAMES.values()),
    frozenset(CHECKPOINTING_FIELDS),
    frozenset(f"{name}_kwargs" for name in CHECKPOINTING_FIELDS),
    frozenset(("train_sampling_strategy", "group_by_length")),
    frozenset(("packing", "packing_strategy", "padding_free")),
)
"""Fields that replace each other."""


def training_arguments(
    recommendation: Source | RecommendedSetup,
    *,
    world_size: int | None = None,
    config_class: type | None = None,
    **own: Any,
) -> dict[str, Any]:
    """Return the fields for `TrainingArguments(**fields)` or TRL's; `bexp.apply` sets what belongs to the model.

    The micro-batch is that of the candidate that divides the requested batch, see `RecommendedSetup`. The effective
    batch stays as requested: accumulation steps follow from the size and the number of devices. Without a requested
    batch they are left out.

    The Trainer recomputes layers only if all of them are recomputed. Checkpointing is off otherwise, because TRL has it
    on. `apply` sets any other policy, tiles, kernels and compiled layers, so `torch_compile` stays off.

    Autocast (`bf16`) is on if it was measured. Where TRL is loaded, which has it on by default, it is off otherwise.
    The optimizer is the measured one, and texts are grouped by length if that was measured. If a step of your own code
    was measured, these fields are left to it.

    Args:
        recommendation: a path, a JSON text, a JSON object, or a set-up that was read.
        world_size: the number of devices; default: WORLD_SIZE.
        config_class: the class that takes the fields; default: transformers' TrainingArguments. Those for TRL's
            SFTConfig also say whether texts are packed (`packing`), and leave the loss to the model (`loss_type`).
        own: fields of yours, such as `output_dir="out"` or `bf16=True`. They win over measured ones, and a warning is
            logged for each that contradicts the measurement.

    Raises:
        RecommendationError: the micro-batch does not divide the effective batch on so many devices.
    """
    setup = RecommendedSetup.read(recommendation)
    devices = world_size or int(os.environ.get("WORLD_SIZE", "1"))
    size = own.get(_SIZE, setup.micro_batch_size)
    fields: dict[str, Any] = {_SIZE: size}
    if setup.effective_batch_size is not None and _ACCUMULATION not in own:
        fields[_ACCUMULATION] = setup.grad_accum_steps(devices, size)
    if not setup.own_code:
        fields |= _fields_of_the_code(setup, _known_fields(config_class))
    for names in _SAME:
        if not names.isdisjoint(own):
            fields = {name: value for name, value in fields.items() if name not in names}
    if own.get("optim", fields.get("optim")) != fields.get("optim"):
        fields.pop("optim_args", None)
    fields |= own
    for difference in _contradictions(setup, fields, devices):
        _LOGGER.warning("TrainingArguments, and what was measured: %s", difference)
    return fields


def _fields_of_the_code(setup: RecommendedSetup, known: frozenset[str]) -> dict[str, Any]:
    recomputes = setup.settings.recompute == "full"
    name = next((name for name in CHECKPOINTING_FIELDS if name in known), CHECKPOINTING_FIELDS[-1])
    fields: dict[str, Any] = {"torch_compile": False, name: recomputes}
    if recomputes:
        fields[f"{name}_kwargs"] = {"use_reentrant": False}
    if setup.batching == "grouped":
        is_older = "group_by_length" in known  # before transformers 5.2
        fields |= {"group_by_length": True} if is_older else {"train_sampling_strategy": "group_by_length"}
    if setup.optimizer is not None:
        if setup.optimizer in LIBRARY_NAMES:
            fields["optim"] = LIBRARY_NAMES[setup.optimizer]
        else:
            _LOGGER.warning("TrainingArguments, and what was measured: %s", LIBRARY[setup.optimizer].note)
        if setup.optimizer in LIBRARY_ARGUMENTS:
            fields["optim_args"] = LIBRARY_ARGUMENTS[setup.optimizer]
        if setup.has_host_optimizer:
            fields["max_grad_norm"] = 0.0
        if setup.autocast in HALF_NAMES:
            fields[HALF_NAMES[setup.autocast]] = True
        elif "trl" in sys.modules:
            fields["bf16"] = False
    if "packing" in known:  # SFTConfig's alone: `loss_type` means other losses elsewhere
        packs = setup.batching == "packed"
        fields |= {"packing": packs, "padding_free": packs, "loss_type": "nll"}
        if packs:
            fields["packing_strategy"] = "bfd"
        if "trl" in sys.modules and hasattr(importlib.import_module("trl.trainer.utils"), "add_fused_lm_head"):
            _LOGGER.warning("TRL %s: the measured loss is not used, so that memory and speed are others", OWN_LOSS)
    return fields


def _contradictions(setup: RecommendedSetup, fields: dict[str, Any], devices: int) -> Iterator[str]:
    yield from size_difference(setup, fields[_SIZE])
    yield from length_difference(setup, fields.get("max_length"))
    yield from argument_differences(setup, SimpleNamespace(**fields))
    if not setup.own_code and recomputes_layers(SimpleNamespace(**fields)) != (setup.settings.recompute == "full"):
        yield f"gradient checkpointing, where recomputation '{setup.settings.recompute}' was measured"
    batch = fields[_SIZE] * fields.get(_ACCUMULATION, 1) * devices
    if setup.effective_batch_size is not None and batch != setup.effective_batch_size:
        yield f"a batch of {batch} sequences, not {setup.effective_batch_size}"


def _known_fields(config_class: Any) -> frozenset[str]:
    """The names of the fields in the installed version, which renames some; none if it is not installed."""
    if config_class is None:
        try:
            from transformers import TrainingArguments  # noqa: PLC0415 - it takes seconds
        except ImportError:
            return frozenset()
        config_class = TrainingArguments
    return frozenset(field.name for field in dataclasses.fields(config_class))
