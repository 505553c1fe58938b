"""Which meshes a request admits, what bad ones are told, and how the block `parallelism` is read."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from bexp.explorer.dimensions.expert_modes import ExpertMode
from bexp.explorer.dimensions.parallelism import Schedule
from bexp.explorer.meshes.legal import legal_meshes
from bexp.explorer.meshes.mesh import Mesh
from bexp.explorer.model.training import Sharding
from bexp.explorer.request.request import ExplorationRequest
from tests.explorer.shapes import shapes

MODEL = shapes(12, 64, 96, heads=8, vocab=100, length=32, num_query_groups=4)
MOE = {**MODEL, "moe": {"num_experts": 8, "top_k": 2, "expert_ffn_hidden_size": 32}}


def request_of(parallelism: Any = "explore", **changes: Any) -> ExplorationRequest:
    values = {"model": MODEL, "num_devices": 16, "batch_size": 64, **changes}
    return ExplorationRequest.model_validate({**values, "parallelism": parallelism})


def test_a_mesh_uses_all_devices_and_divides_the_model() -> None:
    meshes = legal_meshes(request_of(model=MOE))
    assert len(meshes) == len(set(meshes)) > 100
    for mesh in meshes:
        assert mesh.num_devices == 16
        assert 4 % mesh.tensor == 8 % mesh.expert == (mesh.tensor * mesh.data) % mesh.expert == 0
        assert mesh.num_stages <= 12
        assert (mesh.virtual_stages > 1) is (mesh.schedule is Schedule.INTERLEAVED)
        assert (mesh.schedule is None) is (mesh.pipeline == 1)
    assert {mesh.tensor for mesh in meshes} == {1, 2, 4}
    assert {mesh.pipeline for mesh in meshes} == {1, 2, 4, 8}
    assert {mesh.expert for mesh in meshes} == {1, 2, 4, 8}
    assert {mesh.sharding for mesh in meshes} == set(Sharding)


def test_named_sizes_are_kept_to() -> None:
    found = legal_meshes(
        request_of({"tensor": [1, 2], "pipeline": 4, "schedule": "1f1b"}, training={"sharding": "zero1"})
    )
    common = {"pipeline": 4, "schedule": Schedule.ONE_F_ONE_B, "sharding": Sharding.ZERO1}
    assert found == (Mesh(tensor=1, data=4, **common), Mesh(tensor=2, data=2, **common))


@pytest.mark.parametrize(
    ("parallelism", "changes", "message"),
    [
        ({"tensor": 3}, {}, r"tensor \(3\) does not divide num_devices \(16\); the nearest that can be is 2 or 4"),
        ({"tensor": 8}, {}, r"tensor \(8\) does not divide num_query_groups \(4\); .* is 4"),
        ({"pipeline": 16}, {}, r"pipeline \(16\) exceeds num_layers \(12\); the nearest that can be is 8"),
        ({"virtual_stages": 13}, {}, r"virtual_stages \(13\) exceeds num_layers \(12\)"),
        ({"expert": 16}, {"model": MOE}, r"expert \(16\) exceeds num_experts \(8\); the nearest that can be is 8"),
        ({"expert": 2}, {}, r"expert \(2\) needs a model with experts"),
        ({"tensor": 4, "pipeline": 8}, {}, r"tensor \(4\) x pipeline \(8\) does not divide num_devices \(16\).* is 4"),
        (
            {"pipeline": 8},
            {"batch_size": 8},
            r"as many micro-batches as stages, .* gives a replica 4: use a batch_size of 16, or pipeline 4",
        ),
        ({"tensor": 2}, {"batch_size": 20}, r"not divide into micro-batches of 1, 2, 3, 4 on 8 .* use a multiple of 8"),
        ({"pipeline": 2, "virtual_stages": 2, "schedule": "1f1b"}, {}, "no mesh is left"),
        ({"pipeline": 2, "context": 2}, {}, "whole sequences on a device"),
        ({"tensor": 2}, {"fabric": "h100-nvl-ib400"}, "Extra inputs are not permitted"),
        ({"tensor": 2}, {"num_devices": 1}, r"tensor \(2\) does not divide num_devices \(1\)"),
        (
            {"expert": 2, "tensor": 2, "sharding": "zero1"},
            {"model": MOE},
            "no mesh is left: .*needs either sharding none or as many devices in a stage",
        ),
        ({"tensor": 2}, {"mode": "eval"}, "a mesh is for training"),
        ({"tensor": 2}, {"execution": "compile"}, "devices that share a model need execution 'eager'"),
        (
            {"expert": 1, "expert_mode": "shadowed"},
            {"model": MOE},
            "expert_mode 'shadowed' needs experts on several devices, and expert is 1: use expert 2 or more",
        ),
        ({"expert_mode": ["plain", "overlapped"]}, {}, "expert_mode 'overlapped' needs a model with experts"),
        (
            {"expert": 8, "expert_mode": "shadowed", "shadowed_experts": [2, 9]},
            {"model": MOE},
            r"shadowed_experts \(9\) exceeds num_experts \(8\); the nearest that can be is 8",
        ),
        (
            {"expert": 8, "expert_mode": "shadowed", "overlap_degree": 2},
            {"model": MOE},
            "overlap_degree belongs to expert_mode 'overlapped', which is not explored",
        ),
        ({"expert_mode": "shadowed"}, {"model": MOE}, "needs experts on several devices"),
        ({"pipeline": 2, "sharding": "zero3"}, {"num_devices": 4}, "a pipeline needs sharding none or zero1"),
    ],
)
def test_a_bad_mesh_is_told_the_dimension_and_the_smallest_change(
    parallelism: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        request_of(parallelism, **changes)


def test_no_pipeline_shards_gradients_or_parameters() -> None:
    late = {Sharding.ZERO2, Sharding.ZERO3}
    assert {mesh.pipeline for mesh in legal_meshes(request_of(num_devices=4)) if mesh.sharding in late} == {1}


def test_modes_are_plain_unless_named_or_explored() -> None:
    assert request_of({"expert": 8}, model=MOE).parallelism.expert_modes == (ExpertMode.PLAIN,)
    assert request_of("explore", model=MOE).parallelism.expert_modes == tuple(ExpertMode)
    named = request_of({"expert": 8, "expert_mode": ["shadowed"], "shadowed_experts": 3}, model=MOE)
    assert named.parallelism.expert_modes == (ExpertMode.SHADOWED,)
    assert named == ExplorationRequest.model_validate(named.model_dump(mode="json"))


def test_context_and_sharding_go_where_they_are_kept() -> None:
    values = {"model": MODEL, "num_devices": 4, "batch_size": 64}
    new = ExplorationRequest.model_validate({**values, "parallelism": {"context": [1, 2], "sharding": "zero1"}})
    old = ExplorationRequest.model_validate(
        {**values, "context_parallel": {"sizes": [1, 2]}, "training": {"sharding": "zero1"}}
    )
    assert new == old == ExplorationRequest.model_validate(new.model_dump(mode="json"))
    listed = ExplorationRequest.model_validate({**values, "parallelism": {"sharding": ["zero1", "zero3"]}})
    assert listed.sharding_levels == ("zero1", "zero3")
    assert request_of("explore", training={"sharding": "zero1"}).sharding_levels is None


@pytest.mark.parametrize(
    ("parallelism", "changes"),
    [
        ({"context": 1}, {"context_parallel": {"sizes": [1]}}),
        ({"sharding": "none"}, {"training": {"sharding": "zero1"}}),
        ({"sharding": "none"}, {"sharding_levels": ["zero1"]}),
    ],
)
def test_the_same_in_two_places_is_refused(parallelism: dict[str, Any], changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="given twice"):
        ExplorationRequest.model_validate({"model": MODEL, "num_devices": 4, "parallelism": parallelism, **changes})
