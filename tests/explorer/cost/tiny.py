"""A model so small that its parameters and bytes can be counted by hand, and a device with round figures."""

from __future__ import annotations

from typing import Any, Literal

from bexp.explorer.model.hardware import HardwareSpec, SoftwareVersions
from bexp.explorer.model.model import DType, ModelSpec
from bexp.explorer.model.parts import LayerPart, ModelParts, Part
from bexp.explorer.request.request import ExplorationRequest
from tests.explorer.shapes import shapes

ATTENTION = 200  # norm 8, QKV 8 x (8 + 2 x 4), output 8 x 8
FFN = 392  # norm 8, three matrices of 8 x 16
LAYER = ATTENTION + FFN
EMBEDDING = 256
HEAD = 264
TOTAL = 2 * LAYER + EMBEDDING + HEAD
MODEL = shapes(2, 8, 16, heads=2, vocab=32, length=16, num_query_groups=1)
MOE = {"num_experts": 4, "top_k": 2, "expert_ffn_hidden_size": 4}
PEAK_FLOPS, BANDWIDTH, LAUNCH_SECONDS = 1e12, 1e11, 1e-6


def request(model: dict[str, Any] | None = None, **changes: Any) -> ExplorationRequest:
    """A request for the small model; `model` changes its fields."""
    batch = {"batch_size": 12, "micro_batch_size": "explore"}
    return ExplorationRequest.model_validate({"model": {**MODEL, **(model or {})}, **batch, **changes})


def request_of_parts(**changes: Any) -> ExplorationRequest:
    """A request whose model is described by its parts, as `parts` does."""
    fields = {"hf_config": {"model_type": "described"}, "hf_seq_length": MODEL["seq_length"], "batch_size": 12}
    fields |= {"micro_batch_size": "explore"}
    return ExplorationRequest.model_validate({**fields, **changes})


def model_of(req: ExplorationRequest) -> ModelSpec:
    """The model of a request that has one."""
    assert req.model is not None
    return req.model


def hardware(device_kind: Literal["cpu", "cuda"] = "cuda", **changes: Any) -> HardwareSpec:
    """A device that multiplies at 1 TFLOP/s in bfloat16 and moves 100 GB/s."""
    return HardwareSpec.model_validate(
        {
            "device_kind": device_kind,
            "device_name": "round",
            "memory_bytes": 1000,
            "memory_limit_bytes": 800,
            "context_bytes": 70,
            "matmul_flops_per_second": {DType.BFLOAT16: PEAK_FLOPS},
            "memory_bandwidth_bytes_per_second": BANDWIDTH,
            "launch_seconds": LAUNCH_SECONDS,
            "versions": SoftwareVersions(python="3.12", torch="2.11"),
            **changes,
        }
    )


def parts(**changes: Any) -> ModelParts:
    """A model that a target describes by its parts: two layers of one kind, of which half is trained."""
    layer = {"num_parameters": 100, "parameter_bytes": 200, "trainable_bytes": 60}
    described = {
        "target": "custom",
        "target_version": "1",
        "name": "described",
        "dtype": "bfloat16",
        "seq_length": 16,
        "layers": ("only", "only"),
        "kinds": [LayerPart(name="only", flops_per_token=200.0, saved_bytes_per_token=64.0, **layer)],
        "shell": Part(
            num_parameters=50,
            parameter_bytes=100,
            trainable_bytes=100,
            flops_per_token=100.0,
            saved_bytes_per_token=40.0,
            transient_bytes_per_token=10.0,
        ),
        "output_bytes_per_token": 16,
        "num_parameters": 250,
        "parameter_bytes": 500,
        "trainable_bytes": 220,
    }
    return ModelParts.model_validate({**described, **changes})
