"""A model of six layers of three kinds that a target describes by its parts, and a device that reports it."""

from __future__ import annotations

from typing import Any

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.parts import LayerPart, ModelParts, Part
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.request.request import ExplorationRequest
from tests.explorer.cost.test_composition import MODEL
from tests.explorer.simulator import report

LAYERS = ("dense", "sliding", "experts", "sliding", "experts", "experts")


def part(parameters: int, **changes: Any) -> dict[str, Any]:
    counts = {"num_parameters": parameters, "parameter_bytes": 2 * parameters, "trainable_bytes": 2 * parameters}
    return {**counts, "flops_per_token": 2.0 * parameters, "saved_bytes_per_token": 640.0, **changes}


def parts(**changes: Any) -> ModelParts:
    kinds = [
        LayerPart(name="dense", **part(5000, flops_per_sequence=7e6)),
        LayerPart(name="sliding", **part(4000)),
        LayerPart(name="experts", has_experts=True, **part(50_000, flops_per_token=2e4)),
    ]
    total = 5000 + 2 * 4000 + 3 * 50_000 + 9000
    described = {
        "target": "transformers",
        "target_version": "5.17.0",
        "name": "a_model",
        "dtype": "bfloat16",
        "seq_length": 32,
        "layers": LAYERS,
        "kinds": kinds,
        "shell": Part(**part(9000, transient_bytes_per_token=400.0)),
        "output_bytes_per_token": 128,
        "num_parameters": total,
        "parameter_bytes": 2 * total,
        "trainable_bytes": 2 * total,
        "policies": tuple(Recompute),
        "tiles": True,
    }
    return ModelParts.model_validate({**described, **changes})


def request(**changes: Any) -> ExplorationRequest:
    return ExplorationRequest.model_validate(
        {"model": MODEL, "batch_size": 8, "micro_batch_size": "explore", "routing": {"kind": "uniform"}, **changes}
    )


def device(**changes: Any) -> DeviceReport:
    return report().model_copy(update={"parts": parts(**changes)})


def candidate(**changes: Any) -> Candidate:
    shape = {"micro_batch_size": 4, "attention_backend": "sdpa", "expert_backend": "grouped_mm", "num_query_groups": 1}
    return Candidate.model_validate({**shape, "loss": "library", **changes})
