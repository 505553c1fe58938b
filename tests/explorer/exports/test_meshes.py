"""A mesh of devices in the formats that can be told one."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from bexp.explorer.dimensions.parallelism import Schedule
from bexp.explorer.exports.exploration import ExportSource
from bexp.explorer.exports.export import export
from bexp.explorer.meshes.mesh import Mesh, MeshPlan, PlainMesh
from bexp.explorer.model.training import Sharding
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.trainers.document import ExportError
from bexp.explorer.trainers.registry import FORMATS
from tests.contracts.samples import make_report
from tests.explorer.exports.samples import SHAPES, candidate, offered, recommendation


def planned(**changes: Any) -> ExportSource:
    """An answer for 32 devices with tensor 2, pipeline 2 in two stages a rank, and expert 4."""
    values: dict[str, Any] = {"tensor": 2, "pipeline": 2, "virtual_stages": 2, "schedule": Schedule.INTERLEAVED}
    values |= {"expert": 4, "data": 8, "sharding": Sharding.ZERO1, **changes}
    mesh = Mesh(**values)
    plan = MeshPlan(
        mesh=mesh,
        base_mesh=Mesh(data=32),
        num_micro_batches=16,
        tokens_per_second=32e3,
        compute_share=0.8,
        exchange_share=0.1,
        bubble_share=0.1,
        layers_per_stage=(3, 3, 3, 1),
        fullest_rank=0,
    )
    best = candidate(4, sharding=mesh.sharding)
    return ExportSource(
        id="job1",
        request=ExplorationRequest.model_validate(
            {"model": SHAPES, "num_devices": 32, "batch_size": 512, "parallelism": {"tensor": 2}}
        ),
        report=make_report("NVIDIA H100", "cuda"),
        recommendation=recommendation(best, plan=plan),
    )


def shadowed(**changes: Any) -> ExportSource:
    """The same with shadowed experts, and a plain mesh in their place."""
    exploration = planned(shadowed_experts=2)
    known = exploration.recommendation
    assert known is not None
    assert known.plan is not None
    plain = PlainMesh(
        mesh=Mesh(tensor=1, expert=8, data=32, sharding=Sharding.ZERO1),
        candidate=candidate(2, sharding=Sharding.ZERO1),
        tokens_per_second=known.tokens_per_second / 1.5,
        ratio=1.5,
        predicted=False,
        layers_per_stage=(10,),
        num_micro_batches=8,
        **{"fits": True, **changes},
    )
    plan = known.plan.model_copy(update={"plain": plain})
    return replace(exploration, recommendation=known.model_copy(update={"plan": plan}))


@pytest.mark.parametrize(
    "changes", [{}, {"tensor": 1, "pipeline": 1, "virtual_stages": 1, "schedule": None, "expert": 1}]
)
def test_the_formats_that_are_offered_are_those_that_can_be_made(changes: dict[str, Any]) -> None:
    answer = planned(**changes)
    assert len(offered(answer)) == (3 if not changes else len(FORMATS))
    for name in FORMATS:
        with nullcontext() if name in offered(answer) else pytest.raises(ExportError, match="mesh"):
            export(name, answer)
