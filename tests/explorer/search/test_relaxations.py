"""What would make a request fit of which nothing does: in the order of preference, each with what it needs."""

from __future__ import annotations

from typing import Any

import pytest

from bexp.explorer.cost.step import GIB, memory_limit
from bexp.explorer.records.recommendation import Relaxation, RelaxationKind
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.relaxations import (
    explain_without_fit,
    find_relaxations,
    smallest_requirement,
)
from tests.explorer.explorations import request
from tests.explorer.simulator import report

DEVICE = report(memory_gib=40)


def cramped(**changes: Any) -> ExplorationRequest:
    """Sixty-four sequences at once, on eight devices that share nothing yet, and nothing else allowed."""
    return request(
        **{
            "micro_batch_size": 64,
            "batch_size": 512,
            "num_devices": 8,
            "recompute": ["none"],
            "bta": {"enable": False},
            "memory_limit_gib": 20,
            **changes,
        }
    )


def remedies(req: ExplorationRequest) -> tuple[Relaxation, ...]:
    return find_relaxations(req, DEVICE, req.shapes)


def test_every_kind_is_named_in_the_order_of_preference() -> None:
    wide = cramped(training={"sharding": "zero1", "loss": {"kind": "full"}}, micro_batch_size=16)
    limit = smallest_requirement(wide, DEVICE, wide.shapes) / GIB - 0.01
    req = wide.model_copy(update={"memory_limit_gib": limit})
    several = report(memory_gib=40, num_devices=8)
    found = find_relaxations(req, several, req.shapes)
    single = [kind for kind in RelaxationKind if kind not in {RelaxationKind.PARALLELISM, RelaxationKind.SEVERAL}]
    assert list(dict.fromkeys(relaxation.kind for relaxation in found)) == single
    shared = [relaxation for relaxation in found if relaxation.kind is RelaxationKind.CONTEXT_PARALLEL]
    assert [relaxation.change for relaxation in shared] == ["2 devices a sequence (context_parallel sizes [2])"]
    assert [relaxation.kind for relaxation in remedies(req)] == [r.kind for r in found if r not in shared], (
        "with one device"
    )
    why, _ = explain_without_fit(req, DEVICE, req.shapes)
    assert why.count("It would fit with micro_batch_size 8 (") == 1


def test_the_nearest_micro_batch_that_fits_is_named() -> None:
    req = cramped()
    first = remedies(req)[0]
    assert first.kind is RelaxationKind.MICRO_BATCH_SIZE
    size = first.settings["micro_batch_size"]
    above = ExplorationRequest.model_validate({**req.model_dump(), "micro_batch_size": 2 * size})
    assert smallest_requirement(above, DEVICE, req.shapes) > memory_limit(req, DEVICE.hardware)
    assert first.change == f"micro_batch_size {size}"


def test_more_devices_before_a_higher_level_where_the_state_is_sharded() -> None:
    wide = cramped(micro_batch_size=1, recompute=["full"], num_devices=2, batch_size=8, training={"sharding": "zero1"})
    limit = smallest_requirement(wide, DEVICE, wide.shapes) / GIB - 0.3
    found = remedies(wide.model_copy(update={"memory_limit_gib": limit}))
    assert found[0].kind is RelaxationKind.NUM_DEVICES
    assert [r.change for r in found if r.kind is RelaxationKind.SHARDING] == ["sharding zero2", "sharding zero3"]
    assert found[0].settings == {"num_devices": 4, "batch_size": 16}
    assert found[-1].settings["training"]["sharding"] == "zero3"


TILES: dict[str, Any] = {"micro_batch_size": 4, "batch_size": 12, "bta": {"enable": True, "tiles": [4]}}
CEREBRAS: dict[str, Any] = {"trainer": "cerebras", "micro_batch_size": 64}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({**TILES, "num_devices": 1, "memory_limit_gib": 4}, "other tiles, micro_batch_size 1"),
        ({**CEREBRAS, "recompute": None, "memory_limit_gib": 5}, "bexp.apply in place of trainer cerebras, "),
        (
            {**CEREBRAS, **TILES, "num_devices": 1, "memory_limit_gib": 4},
            "other tiles, bexp.apply in place of trainer cerebras, micro_batch_size 1",
        ),
    ],
)
def test_named_tiles_and_a_trainer_that_stand_in_the_way_are_left_out(changes: dict[str, Any], words: str) -> None:
    req = cramped(**changes)
    (relaxation,) = remedies(req)
    assert relaxation.kind is RelaxationKind.SEVERAL
    assert relaxation.change.startswith(words)
    changed = ExplorationRequest.model_validate({**req.model_dump(), **relaxation.settings})
    assert smallest_requirement(changed, DEVICE, changed.shapes) <= memory_limit(changed, DEVICE.hardware)
