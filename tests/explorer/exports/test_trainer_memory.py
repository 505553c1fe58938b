"""The bytes of number formats that were not measured, by formulas of bytes a parameter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bexp.explorer.cost.parameters import count_parameters
from bexp.explorer.exports.choice import unmeasured_bytes
from bexp.explorer.exports.export import export
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.trainers.registry import FORMATS, TRAINERS
from tests.explorer.exports.samples import PARTS, candidate, exploration, own_exploration

NUMBER, SHELL = 1000, 300
SHAPES = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 64, "num_attention_heads": 8, "vocab_size": 64}
BYTES = {"pure": 8, "autocast": 16, "master": 16, "upcast": 8}
"""Of a parameter in bfloat16, with AdamW: weights, gradients, master weights and moments."""


def library(precision: str, **changes: Any) -> tuple[ExplorationRequest, DeviceReport]:
    made = exploration(training={"precision": precision, **changes.pop("training", {})}, **changes)
    size = (4 if precision == "autocast" else 2) * NUMBER
    shell = PARTS.shell.model_copy(update={"num_parameters": SHELL})
    sizes = {"num_parameters": NUMBER, "parameter_bytes": size, "trainable_bytes": size, "shell": shell}
    assert made.report is not None
    assert made.request is not None
    return made.request, made.report.model_copy(update={"parts": PARTS.model_copy(update=sizes)})


@pytest.mark.parametrize(
    ("trainer", "measured", "activations", "extra"),
    [
        ("deepspeed", "pure", 4 * NUMBER, 8 * NUMBER),
        ("deepspeed", "pure", 9 * NUMBER, 8 * NUMBER),
        ("deepspeed", "pure", NUMBER, 11 * NUMBER),  # the float32 gradients of its step take more than the activations
        ("megatron", "autocast", 9 * NUMBER, 0),
        ("megatron", "autocast", NUMBER, 3 * NUMBER),
        ("transformers", "master", NUMBER, 0),
        ("transformers", "pure", NUMBER, 0),
        ("axolotl", "pure", NUMBER, 8 * SHELL),  # 2 bytes more of weights and gradients, and 4 of the moments
        ("axolotl", "autocast", NUMBER, 0),
    ],
)
def test_formats_that_were_not_measured_are_counted(trainer: str, measured: str, activations: int, extra: int) -> None:
    request, report = library(measured)
    peak = BYTES[measured] * NUMBER + activations
    assert unmeasured_bytes(TRAINERS[trainer], request, report, candidate(), peak) == extra


def test_sharded_training_has_its_share_of_them() -> None:
    request, report = library("pure", num_devices=8, training={"sharding": "zero3"})
    peak = NUMBER + 4 * NUMBER
    assert unmeasured_bytes(TRAINERS["deepspeed"], request, report, candidate(), peak) == NUMBER
    assert unmeasured_bytes(TRAINERS["axolotl"], request, report, candidate(), peak) == 0, "it casts nothing"


@pytest.mark.parametrize(("trainer", "bytes_each"), [("deepspeed", 8), ("megatron", 8), ("bexp", 0), ("axolotl", 0)])
def test_shapes_without_master_weights_need_more_where_a_trainer_has_them(trainer: str, bytes_each: int) -> None:
    training = {"optimizer": {"master_dtype": None}}
    request = ExplorationRequest.model_validate({"model": {**SHAPES, "seq_length": 128}, "training": training})
    assert request.model is not None
    number = count_parameters(request.model)
    found = unmeasured_bytes(TRAINERS[trainer], request, None, candidate(), 80 * number)
    assert found == bytes_each * number


KEEP_FLOAT32 = FORMATS.keys() - {"axolotl"}
"""Formats of trainers that step float32 weights, whose moments are in float32."""


@pytest.mark.parametrize(
    ("optimizer", "bytes_each", "lost", "losing"),
    [
        ({"state_dtype": "bfloat16"}, dict.fromkeys(KEEP_FLOAT32, 4), "optimizer states in bfloat16", KEEP_FLOAT32),
        ({"state_dtype": "float32"}, {}, "optimizer states in float32", {"axolotl"}),
        ({"grad_dtype": "float32"}, {}, "gradients in float32", {"deepspeed", "axolotl"}),
        ({}, {}, None, {}),
    ],
)
def test_formats_of_moments_and_gradients_that_a_trainer_cannot_be_told_are_counted_and_named(
    optimizer: dict[str, Any], bytes_each: dict[str, int], lost: str | None, losing: set[str]
) -> None:
    shapes: dict[str, Any] = {"hf_config": None, "hf_seq_length": None, "model": {**SHAPES, "seq_length": 128}}
    answer = exploration(candidate(expert_backend=None), **shapes, training={"optimizer": optimizer})
    answer = replace(answer, report=None)
    assert answer.request is not None
    assert answer.request.model is not None
    number = count_parameters(answer.request.model)
    for name, known in FORMATS.items():
        found = unmeasured_bytes(known.trainer, answer.request, None, candidate(), 80 * number)
        assert found == bytes_each.get(name, 0) * number, name
        lines = [line for line in export(name, answer).header if "states in" in line or "gradients in" in line]
        told = [line for line in lines if line.startswith("lost:")]
        assert len(told) == (name in losing), name
        assert all(f"cannot express {lost}" in line for line in told)


def test_nothing_is_counted_for_adapters_and_a_persons_own_code() -> None:
    lora = {"lora": {"r": 8, "target_modules": ["q_proj"]}}
    request, report = library("pure", training=lora)
    deepspeed = TRAINERS["deepspeed"]
    assert unmeasured_bytes(deepspeed, request, report, candidate(), 8 * NUMBER) == 0
    own = own_exploration(512)
    assert own.request is not None
    assert unmeasured_bytes(deepspeed, own.request, own.report, candidate(), 8 * NUMBER) == 0
