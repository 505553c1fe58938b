"""A tiny model whose export a framework trains with, and the bytes that the exploration promises for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.cost.part_costs import predict_part_bytes
from bexp.explorer.cost.step import static_parts
from bexp.explorer.cost.text_batches import TextBatch
from bexp.explorer.exports.export import export
from bexp.explorer.request.request import ExplorationRequest
from bexp.measure.memory_meters import LiveStorages
from bexp.workers.instruments.device_instruments import Instruments
from bexp.workers.targets.transformers.batch import make_batch
from bexp.workers.targets.transformers.config import resolve_config
from bexp.workers.targets.transformers.model import BuildSettings, build_model
from bexp.workers.targets.transformers.target import TransformersTarget
from tests.explorer.exports.samples import candidate, exploration
from tests.workers.targets.transformers.targets import HARDWARE, LLAMA

CONFIG = {**LLAMA, "tie_word_embeddings": True}
SEQ_LENGTH, MICRO_BATCH_SIZE = 64, 2  # Axolotl pads to whole multiples of 64
CPU = torch.device("cpu")
TRAINED: dict[str, dict[str, Any]] = {
    "deepspeed": {"training": {"precision": "master"}},
    "axolotl": {"trainer": "axolotl"},
}
"""What is asked of the exploration, by the format of its export."""


def write_promise(export_format: str, folder: Path) -> None:
    """Write `config.json`, the export, and `promise.json`: bytes by what they hold, and those of the step alone.

    `micro_step_peak` is what a micro-step allocates beside parameters and batch, its gradients included.
    """
    changes = {"hf_config": CONFIG, "hf_seq_length": SEQ_LENGTH, "batch_size": 4, **TRAINED[export_format]}
    best = candidate(MICRO_BATCH_SIZE, expert_backend=None)
    asked = exploration(best, **changes)
    assert asked.request is not None
    parts = TransformersTarget(asked.request, Instruments(CPU)).report(HARDWARE).parts
    assert parts is not None
    step = predict_part_bytes(Component(kind=ComponentKind.OPTIMIZER, micro_batch_size=0), parts, asked.request)
    promised = static_parts(parts, asked.request).model_dump() | {
        "converted_gradients": step.backward_peak,
        "micro_step_peak": _micro_step_peak(asked.request),
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "promise.json").write_text(json.dumps(promised))
    (folder / "export").write_text(export(export_format, asked).text)


def _micro_step_peak(request: ExplorationRequest) -> int:
    build = BuildSettings(precision=request.training.precision)
    resolved = resolve_config(CONFIG, SEQ_LENGTH)
    model, batch = (
        build_model(resolved, build, CPU),
        make_batch(resolved.config, TextBatch.whole(MICRO_BATCH_SIZE, SEQ_LENGTH), CPU),
    )
    with LiveStorages([*model.parameters(), *model.buffers(), *batch.values()]) as storages:
        with build.autocast(CPU):
            loss = model(**batch).loss
        loss.backward()
    return storages.peak_bytes
