"""A trainer in one file, as a new one is written. No list of the product names it."""

from __future__ import annotations

from bexp.explorer.model.model import DType
from bexp.explorer.trainers.document import ExportDocument, TrainerSettings, yaml_export
from bexp.explorer.trainers.keys import Formats, Key, Setting, TrainerFile, fields_of, flag, key, number
from bexp.explorer.trainers.trainer import LIBRARY_RUNS_IT, Trainer, expresses

KEYS = {
    "toy_model": Key(Setting.MODEL),
    "rows": key(Setting.MICRO_BATCH_SIZE, number),
    "steps": key(Setting.STEPS, number),
    "tokens": key(Setting.SEQ_LENGTH),
    "solver": key(Setting.OPTIMIZER),
    "half": Key(Setting.HALF, flag, lambda settings: settings.dtype is DType.BFLOAT16),
    "recompute": key(Setting.RECOMPUTATION, flag),
}


def _formats(said: Formats) -> tuple[str, str | None]:
    return "bfloat16" if said.half else "float32", "pure"


def render(settings: TrainerSettings) -> ExportDocument:
    return yaml_export(settings, fields_of(KEYS, settings))


TOY = Trainer(
    name="toy",
    title="Toy",
    formats={"toy-yaml": render},
    file=TrainerFile(
        model="toy_model",
        keys=KEYS,
        formats=_formats,
        refused={"turbo": "is not measured"},
        harmless=frozenset({"color"}),
        defaults={Setting.OPTIMIZER: "adamw_torch_fused"},
        program="toy-train",
    ),
    expresses=expresses(batching=(), attention={"eager", "sdpa"}, experts={"grouped_mm", "eager"}),
    targets=LIBRARY_RUNS_IT,
)
