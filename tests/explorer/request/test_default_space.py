"""What a request explores that names neither executions, nor losses, nor kernels."""

from __future__ import annotations

from typing import Any

import pytest

from bexp.explorer.dimensions.execution import EXECUTION, Execution
from bexp.explorer.dimensions.kernels import KERNELS, Kernels
from bexp.explorer.dimensions.loss import LOSS, LOSSES
from bexp.explorer.request.request import ExplorationRequest
from tests.explorer.choices import choices_of

CONFIG: dict[str, Any] = {"hf_config": {"model_type": "llama"}, "hf_seq_length": 8}
MODEL = {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 1, "seq_length": 8}
SHAPES: dict[str, Any] = {"model": MODEL | {"vocab_size": 8}}
EAGER = (Execution.EAGER,)


def build(fields: dict[str, Any], **others: Any) -> ExplorationRequest:
    return ExplorationRequest.model_validate(fields | others)


def test_a_gpu_explores_all_that_can_be_had_without_asking() -> None:
    space = build(CONFIG).space_on("cuda")
    assert space.executions == choices_of(space, EXECUTION) == tuple(Execution)
    assert LOSS.considered(space.place) == tuple(name for name, loss in LOSSES.items() if loss.is_explored)
    assert choices_of(space, KERNELS) == tuple(Kernels)
    shapes = build(SHAPES).space_on("cuda")
    assert shapes.executions == tuple(Execution)
    assert choices_of(shapes, KERNELS) == (None,)


@pytest.mark.parametrize("fields", [CONFIG, SHAPES])
def test_a_cpu_and_a_quick_request_stay_eager_with_the_librarys_loss(fields: dict[str, Any]) -> None:
    on_cpu = build(fields).space_on("cpu")
    for space in (on_cpu, build(fields, device_kind="cpu").space, build(fields, quick=True).space_on("cuda")):
        assert space.executions == EAGER
        assert (choices_of(space, EXECUTION), choices_of(space, KERNELS)) == ((None,), (None,))
        assert LOSS.considered(space.place) == ("library",)


def test_what_is_named_is_explored_on_any_device() -> None:
    named = build(CONFIG, execution="compile", losses=["chunked"], kernels=["library"], quick=True).space_on("cpu")
    assert named.executions == (Execution.COMPILE,)
    assert choices_of(named, EXECUTION) == (None,)
    assert LOSS.considered(named.place) == ("chunked",)
    both = build(CONFIG, execution=["eager", "compile"]).space_on("cpu")
    assert choices_of(both, EXECUTION) == (Execution.EAGER, Execution.COMPILE)


def test_a_trainer_is_asked_for_no_loss_and_no_kernels_that_it_cannot_be_told() -> None:
    space = build(CONFIG, trainer="accelerate").space_on("cuda")
    assert LOSS.considered(space.place) == ("library",)
    assert choices_of(space, KERNELS) == (None,)


def test_several_devices_that_compute_together_stay_eager() -> None:
    shared = build(SHAPES, num_devices=2, batch_size=8, context_parallel={"sizes": [2]})
    assert shared.space_on("cuda").executions == EAGER
    heads = {"model": SHAPES["model"] | {"num_attention_heads": 2}}
    mesh = build(heads, num_devices=2, batch_size=8, parallelism={"tensor": [2]})
    assert mesh.space_on("cuda").executions == EAGER


def test_experts_with_a_capacity_are_never_captured() -> None:
    experts = {"num_experts": 2, "top_k": 1, "expert_ffn_hidden_size": 8, "capacity_factor": 1.0}
    asked = build({"model": SHAPES["model"] | {"moe": experts}})
    assert asked.space_on("cuda").executions == (Execution.EAGER, Execution.COMPILE)
