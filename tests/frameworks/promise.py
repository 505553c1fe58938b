"""A tiny model whose export a framework trains with, and the bytes that the exploration promises for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bexp.explorer.cost_model.components import Component, ComponentKind
from bexp.explorer.cost_model.part_costs import predict_part_bytes
from bexp.explorer.cost_model.step import static_parts
from bexp.explorer.exports.registry import export
from tests.explorer.exports.samples import candidate, exploration
from tests.workers.targets.transformers.targets import HARDWARE, LLAMA, open_target

CONFIG = {**LLAMA, "tie_word_embeddings": True}
TRAINED: dict[str, dict[str, Any]] = {"deepspeed": {"training": {"precision": "master"}}}
"""What is asked of the exploration, by the format of its export."""


def write_promise(export_format: str, folder: Path) -> None:
    """Write `config.json`, the export, and `promise.json`: bytes by what they hold, and those of the step alone."""
    changes: dict[str, Any] = {"hf_config": CONFIG, "hf_seq_length": 16, "batch_size": 4, **TRAINED[export_format]}
    asked = exploration(candidate(2, expert_backend=None), **changes)
    assert asked.request is not None
    parts = open_target(CONFIG, **TRAINED[export_format]).report(HARDWARE).parts
    assert parts is not None
    step = predict_part_bytes(Component(kind=ComponentKind.OPTIMIZER, micro_batch_size=0), parts, asked.request)
    promised = static_parts(parts, asked.request).model_dump() | {"converted_gradients": step.backward_peak}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "promise.json").write_text(json.dumps(promised))
    (folder / "export.json").write_text(export(export_format, asked).text)
