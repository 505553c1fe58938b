"""Fields of transformers' `TrainingArguments`, and two arguments of the model, as JSON for `HfArgumentParser`.

Names as of transformers 5.23. `attn_implementation` and `experts_implementation` are arguments of the model: they
belong to a dataclass that the script passes to the parser beside `TrainingArguments`.
"""

from __future__ import annotations

from typing import Any

from bexp.explorer.exports.document import ExportDocument, json_export
from bexp.explorer.exports.framework import LIBRARY_ATTENTION, LIBRARY_EXPERTS, Framework
from bexp.explorer.exports.sharding_communication import gathering_notes, reduces_each_batch
from bexp.explorer.exports.trainer_settings import TrainerSettings
from bexp.explorer.spec.candidate import Recompute
from bexp.explorer.spec.model import DType
from bexp.explorer.spec.target import TRANSFORMERS
from bexp.explorer.spec.training import Sharding

EVERY_NTH_LAYER = {Recompute.FULL: 1, Recompute.PARTIAL_50: 2, Recompute.PARTIAL_25: 4}
"""The policies that recompute one layer of every so many."""
FRAMEWORK = Framework(
    title="transformers' Trainer",
    attention=LIBRARY_ATTENTION,
    experts=LIBRARY_EXPERTS,
    policies=frozenset({Recompute.NONE, *EVERY_NTH_LAYER}),
    targets=frozenset({TRANSFORMERS}),
)
PRECISION = {DType.BFLOAT16: "bf16", DType.FLOAT16: "fp16"}


def render(settings: TrainerSettings) -> ExportDocument:
    """Return the JSON. `torch_compile` is off, because it compiles the whole model and no export asks for that."""
    values: dict[str, Any] = {
        "per_device_train_batch_size": settings.micro_batch_size,
        "gradient_accumulation_steps": settings.grad_accum_steps,
        "auto_find_batch_size": False,
        "torch_compile": False,
        **precision_fields(settings),
        **_recompute_fields(settings),
        **sharding_fields(settings),
        **model_fields(settings),
    }
    if settings.device_kind == "cpu":
        values["use_cpu"] = True
    return json_export(settings, values, gathering_notes(settings))


def model_fields(settings: TrainerSettings) -> dict[str, Any]:
    """Return the arguments of the model, without those that the library chooses by itself."""
    fields = {"attn_implementation": settings.attention, "experts_implementation": settings.experts}
    return {name: value for name, value in fields.items() if value is not None}


def precision_fields(settings: TrainerSettings) -> dict[str, Any]:
    """Return the field that computes in half precision; none for float32."""
    return {PRECISION[settings.dtype]: True} if settings.dtype in PRECISION else {}


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
