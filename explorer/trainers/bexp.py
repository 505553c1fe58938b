"""A Python module that sets a transformers model up as recommended, with `bexp.apply` and `bexp.training_arguments`."""

from __future__ import annotations

import json
from typing import Any

from bexp.explorer.dimensions.attention import LIBRARY_ATTENTION, TORCH_KERNELS
from bexp.explorer.dimensions.bta_tile import TILES
from bexp.explorer.dimensions.candidate import CHOICES
from bexp.explorer.dimensions.experts import LIBRARY_EXPERTS, OUR_EXPERTS
from bexp.explorer.dimensions.recompute import DIFFERENT_LAYERS, FIRST_LAYERS, LAYER_GROUPS, Recompute
from bexp.explorer.model.lengths import PACKED
from bexp.explorer.model.optimizers import LIBRARY, LIBRARY_NAMES
from bexp.explorer.model.target import TRANSFORMERS
from bexp.explorer.model.training import Sharding
from bexp.explorer.trainers.document import (
    PREPARE,
    ExportDocument,
    TrainerSettings,
    lora_config,
    python_export,
    quantization_config,
)
from bexp.explorer.trainers.trainer import LIBRARY_RUNS_IT, MUON_WITH_EXPERTS, OTHER_LIBRARIES, Trainer, expresses

_CODE = '''\
import json

import bexp

RECOMMENDATION = json.loads(
    r"""
{recommendation}
"""
)


def set_up(model):
    """Set a transformers model up as recommended; call it before the model is wrapped and before CUDA starts."""
    return bexp.apply(model, RECOMMENDATION, seq_length={seq_length})


def training_arguments(**others):
    """Return `TrainingArguments`{batch} on the devices that there are."""
    from transformers import TrainingArguments

    return TrainingArguments(**bexp.training_arguments(RECOMMENDATION, **others))
'''

_COMPARED = {"target", "quantization", "batch_size", "num_devices", "allocator", "execution", "lengths", "batching"}
_TRAINED = {"loss", "precision", "lora"}
"""Fields of the request, and of its training, that `bexp.apply` and the callback read; an optimizer has defaults."""


def render(settings: TrainerSettings) -> ExportDocument:
    """Return the module. Sharding is left to the launcher."""
    notes = []
    if settings.sharding is not Sharding.NONE:
        notes.append(f"sharding: measured with '{settings.sharding}', which the launcher sets, not this module")
    if settings.quantization is not None:
        notes.append(f"weights: load them with {quantization_config(settings.quantization)}; {PREPARE}")
    if settings.lora is not None:
        notes.append(f"adapters: call peft.get_peft_model(model, {lora_config(settings.lora)}) before set_up")
    size = settings.batch_size
    batch = "" if size is None else f" that keep the batch of {size} sequences"
    text = json.dumps(_recommendation(settings), indent=1, allow_nan=False, ensure_ascii=True)
    known = LIBRARY.get(settings.optimizer)
    if known is not None and known.note is not None:
        notes.append(known.note)
    return python_export(
        settings, _CODE.format(recommendation=text, seq_length=settings.seq_length, batch=batch), notes
    )


def _recommendation(settings: TrainerSettings) -> dict[str, Any]:
    """Return the document that `bexp.apply` reads: the candidate, and fields of the request that a model must meet."""
    training, asked = settings.training, settings.request
    request = {key: value for key, value in asked.items() if key in _COMPARED}
    request["training"] = {key: value for key, value in asked["training"].items() if key in _TRAINED}
    if settings.quantization is not None:
        request["quantization"] = settings.quantization.name  # a config.json is cut down to its numbers
    if settings.target_name == TRANSFORMERS:
        request["training"]["precision"] = settings.precision
    request["training"]["optimizer"] = training.optimizer.model_dump(mode="json", exclude_defaults=True)
    request |= settings.model
    candidate = settings.candidate.model_dump(mode="json", exclude_none=True) | {"recompute": settings.recompute.value}
    for key, kept in (("attention_backend", settings.attention), ("expert_backend", settings.experts)):
        # The reader leaves a model that was measured whole as it is.
        if kept is None and not settings.candidate.is_whole:
            candidate.pop(key, None)
    recommendation: dict[str, Any] = {"candidate": candidate, "dtype": settings.dtype.value}
    if settings.tokens_per_sequence is not None:
        recommendation["texts"] = {"tokens_per_sequence": settings.tokens_per_sequence}
    return {
        "recommendation": recommendation,
        "hardware": settings.hardware.model_dump(mode="json", include={"device_name", "versions"})
        if settings.hardware is not None
        else None,
        "request": request,
    }


BEXP_APPLY = Trainer(
    name="bexp",
    title="bexp.apply",
    formats={"python": render},
    expresses=expresses(
        bta_tile={TILES},
        recompute={*Recompute, FIRST_LAYERS, LAYER_GROUPS, DIFFERENT_LAYERS} - {Recompute.QKV},
        attention=LIBRARY_ATTENTION | TORCH_KERNELS,
        experts=LIBRARY_EXPERTS | {*OUR_EXPERTS, *(f"bexp_{name}" for name in OUR_EXPERTS)},
        sharding=Sharding,
        **{choice.name: choice.values for choice in CHOICES},
        optimizer={OTHER_LIBRARIES, MUON_WITH_EXPERTS, *(LIBRARY.keys() - LIBRARY_NAMES.keys())},
        batching={"padded", "grouped", *PACKED},
    ),
    targets=LIBRARY_RUNS_IT,
    precisions=("pure", "autocast", "float8_tensorwise", "float8_rowwise"),
)
"""transformers' Trainer, or any loop, with `bexp.apply`."""
