"""What would make a request fit of which nothing does: in the order of preference, each with what it needs."""

from __future__ import annotations

from typing import Any

import pytest

from bexp.explorer.cost.step import GIB, memory_limit
from bexp.explorer.dimensions.dimension import Change, Dimension
from bexp.explorer.dimensions.micro_batch_size import MICRO_BATCH_SIZE
from bexp.explorer.dimensions.sharding import SHARDING
from bexp.explorer.records.recommendation import Relaxation, RelaxationKind
from bexp.explorer.request.request import ExplorationRequest, reported_place
from bexp.explorer.search.relaxations import (
    _over,
    _together,
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


def test_several_together_only_where_no_single_one_helps() -> None:
    (relaxation,) = remedies(cramped(memory_limit_gib=5))
    assert relaxation.kind is RelaxationKind.SEVERAL
    assert "zero3 over" in relaxation.change


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


def test_full_recomputation_leaves_no_policy_to_offer() -> None:
    found = remedies(cramped(recompute=["none", "full"], micro_batch_size=256, batch_size=2048, memory_limit_gib=12))
    assert found
    assert all(relaxation.kind is not RelaxationKind.RECOMPUTE for relaxation in found)


def test_a_sequence_too_long_for_any_change_has_none() -> None:
    req = cramped(memory_limit_gib=0.6)
    assert remedies(req) == ()
    assert "No micro-batch, recomputation or sharding" in explain_without_fit(req, DEVICE, req.shapes)[0]


@pytest.mark.parametrize(("batch_size", "expected"), [(8, 16), (24, 48), (31, 48)])
def test_more_devices_keep_the_sequences_of_each(batch_size: int, expected: int) -> None:
    req = cramped(micro_batch_size=[1], batch_size=batch_size)
    assert _over(req, "", 16).settings == {"num_devices": 16, "batch_size": expected}
    assert _over(cramped(batch_size=None), "", 16).settings == {"num_devices": 16}


def test_a_device_has_at_least_one_sequence() -> None:
    req = cramped(micro_batch_size=1, batch_size=8).model_copy(update={"batch_size": 4})
    assert _over(req, "", 16).settings["batch_size"] == 16


def test_two_devices_share_training_state_before_more_are_asked_for() -> None:
    two = cramped(num_devices=2, batch_size=128)
    words = [change.words for change in _together(two)]
    assert words[:2] == [
        "micro_batch_size 1 and recompute full",
        "micro_batch_size 1, recompute full and sharding zero3 over 2 devices",
    ]
    assert words[2].endswith("over 4 devices")
    assert [change.words for change in changes(SHARDING, two)] == ["sharding zero1", "sharding zero2", "sharding zero3"]
    alone = cramped(num_devices=1, batch_size=64)
    assert [change.words for change in _together(alone)][1].endswith("over 2 devices")
    assert changes(SHARDING, alone) == []


def changes(dimension: Dimension, asked: ExplorationRequest) -> list[Change]:
    return list(dimension.relaxations(reported_place(asked, report(), asked.shapes)))


def test_smaller_micro_batches_are_tried_from_the_next_one_down() -> None:
    asked = cramped(micro_batch_size=[8, 16])
    assert [change.settings["micro_batch_size"] for change in changes(MICRO_BATCH_SIZE, asked)] == [4, 2, 1]
    assert changes(MICRO_BATCH_SIZE, cramped(micro_batch_size=1)) == []
