"""What would make a request fit of which nothing does: in the order of preference, each with what it needs."""

from __future__ import annotations

from typing import Any

import pytest

from bexp.explorer.cost.step import GIB, memory_limit
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.parts import Part
from bexp.explorer.records.recommendation import Relaxation, RelaxationKind
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.relaxations import (
    SmallestCandidate,
    explain_without_fit,
    find_relaxations,
)
from tests.explorer.cost import described
from tests.explorer.cost.described import part
from tests.explorer.explorations import MODEL, request
from tests.explorer.search.least import smallest_requirement
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
    training = {"sharding": "zero1", "loss": {"kind": "full"}}
    wide = cramped(model={**MODEL, "num_layers": 12}, training=training, micro_batch_size=16)
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


@pytest.mark.parametrize(
    ("batch_size", "words", "settings"),
    [(8, "num_devices 4", {}), (6, "num_devices 4 and batch_size 8", {"batch_size": 8})],
)
def test_more_devices_before_a_higher_level_keep_the_batch_or_name_it(
    batch_size: int, words: str, settings: dict[str, int]
) -> None:
    sharded: dict[str, Any] = {"num_devices": 2, "training": {"sharding": "zero1"}}
    wide = cramped(micro_batch_size=1, recompute=["full"], batch_size=batch_size, **sharded)
    limit = smallest_requirement(wide, DEVICE, wide.shapes) / GIB - 0.3
    found = remedies(wide.model_copy(update={"memory_limit_gib": limit}))
    assert found[0].kind is RelaxationKind.NUM_DEVICES
    assert [r.change for r in found if r.kind is RelaxationKind.SHARDING] == ["sharding zero2", "sharding zero3"]
    assert (found[0].change, found[0].settings) == (words, {"num_devices": 4, **settings})
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


CONFIG = {"hf_config": {"model_type": "llama"}, "hf_seq_length": 32}
CANDIDATE = Candidate(micro_batch_size=16, attention_backend="flash", expert_backend="bmm", num_query_groups=4)


def test_where_logits_are_the_wall_only_what_shrinks_them_is_named() -> None:
    """A higher level of sharding and recomputation also leave enough, for the logits that nobody needs."""
    training = {"sharding": "zero1", "loss": {"kind": "full"}}
    wide = cramped(model={**MODEL, "vocab_size": 152_064}, training=training, micro_batch_size=16)
    req = wide.model_copy(update={"memory_limit_gib": smallest_requirement(wide, DEVICE, wide.shapes) / GIB - 0.01})
    reason, found = explain_without_fit(req, DEVICE, req.shapes)
    assert [relaxation.change for relaxation in found] == ["micro_batch_size 8", "the chunked loss"]
    assert "is logits with 55.8 GiB (16 x 2,048 x 152,064 in float32 = 18.6 GiB, held by loss=full)" in reason


def test_where_optimizer_states_are_the_wall_a_smaller_batch_is_no_remedy() -> None:
    optimizer = {"optimizer": {"state_dtype": "float32", "grad_dtype": "bfloat16", "master_dtype": None}}
    req = cramped(micro_batch_size=2, recompute=["full"], training=optimizer, num_devices=2)
    req = req.model_copy(update={"memory_limit_gib": smallest_requirement(req, DEVICE, req.shapes) / GIB - 0.01})
    reason, found = explain_without_fit(req, DEVICE, req.shapes)
    assert {relaxation.kind for relaxation in found} == {RelaxationKind.SHARDING}
    assert "is optimizer states with 3.6 GiB" in reason


LOGITS = part(64_000_000, saved_bytes_per_token=4e6, transient_bytes_per_token=8e6)


@pytest.mark.parametrize(("asked", "is_named"), [(None, True), (["library"], True), (["library", "chunked"], False)])
@pytest.mark.parametrize("sizes", [[4], [1]])
def test_the_chunked_loss_of_a_models_own_code_is_named_unless_it_is_explored(
    asked: list[str] | None, is_named: bool, sizes: list[int]
) -> None:
    model = described.parts(shell=Part(**LOGITS))
    req = described.request(micro_batch_size=sizes, losses=asked, target="transformers", model=None, **CONFIG)
    device = described.device(shell=Part(**LOGITS))
    limit = smallest_requirement(req, device, model) / GIB - 0.01
    found = find_relaxations(req.model_copy(update={"memory_limit_gib": limit}), device, model)
    named = {relaxation.change: relaxation for relaxation in found}
    assert ("the chunked loss" in named) is is_named
    if is_named:
        assert named["the chunked loss"].settings == {"losses": ["chunked"]}


@pytest.mark.parametrize("peak", [0.4, 0.8])
def test_no_remedy_needs_more_than_what_ran_out_of_memory_was_measured_to_need(peak: float) -> None:
    req = cramped(micro_batch_size=16, memory_limit_gib=35)
    needs = round(peak * smallest_requirement(req, DEVICE, req.shapes))
    measured = SmallestCandidate(CANDIDATE, needs, needs, ran_out_of_memory="a component of it")
    reason, found = explain_without_fit(req, DEVICE, req.shapes, measured)
    assert found
    assert all(0 < one.predicted_peak_bytes < needs for one in found)
    assert "less than the limit, and a component of it ran out of memory" in reason
