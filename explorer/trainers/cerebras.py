"""A part of a Cerebras Model Zoo configuration, as YAML, by the names of release 2.10, as `formats` reads it."""

from __future__ import annotations

from typing import Any

from bexp.explorer.dimensions.bta_tile import TILES
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.training import Sharding
from bexp.explorer.trainers.document import ExportDocument, TrainerSettings, other_optimizer_notes, yaml_export
from bexp.explorer.trainers.trainer import Trainer, expresses

BTA_FLAGS = {"csx.debug.ini.ws_opt_enable_bta": "enable", "csx.debug.ini.ws_opt_bta_max_tile": "max_tile"}
"""The fields of a request's `bta` that they set."""
MICRO_BATCH_FLAG = "csx.performance.micro_batch_size"


def render(settings: TrainerSettings) -> ExportDocument:
    """Return the YAML. A system's compiler chooses its kernels, so none is named."""
    tile = settings.candidate.bta_tile
    bta = {"enable": tile is not None, "max_tile": tile}
    flags: dict[str, Any] = {MICRO_BATCH_FLAG: settings.micro_batch_size}
    flags |= {flag: bta[name] for flag, name in BTA_FLAGS.items() if bta[name] is not None}
    values: dict[str, Any] = {
        "trainer": {
            "init": {
                "backend": {"backend_type": "CSX", "cluster_config": {"num_csx": settings.num_devices}},
                "callbacks": [{"ScopedTrainFlags": flags}],
            }
        }
    }
    if settings.batch_size is not None:
        values["trainer"]["fit"] = {"train_dataloader": {"batch_size": settings.batch_size}}
    notes = ["add the model, the optimizer and the data to these sections", *other_optimizer_notes(settings)]
    return yaml_export(settings, values, notes)


CEREBRAS = Trainer(
    name="cerebras",
    title="Cerebras Model Zoo",
    formats={"cerebras": render},
    expresses=expresses(
        recompute={Recompute.NONE},
        sharding={Sharding.NONE},
        bta_tile={TILES},
        loss={"library", "chunked"},  # the system's compiler decides how the loss is computed
        adapters=(),
        batching=(),
    ),
)
