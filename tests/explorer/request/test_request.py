from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from bexp.explorer.dimensions.micro_batch_size import LADDER, MICRO_BATCH_SIZE, ExploreRange
from bexp.explorer.request.request import ExplorationRequest
from tests.explorer.shapes import shapes

MODEL = shapes(2, 64, 128, heads=4, vocab=100, length=32)
MOE: dict[str, Any] = {**MODEL, "moe": {"num_experts": 4, "top_k": 2, "expert_ffn_hidden_size": 32}}


def moe_with(factor: Any) -> dict[str, Any]:
    return {**MODEL, "moe": {**MOE["moe"], "capacity_factor": factor}}


def build(**changes: Any) -> ExplorationRequest:
    return ExplorationRequest.model_validate({"model": MODEL, **changes})


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"micro_batch_size": list(range(1, 66))}, "micro_batch_size"),
        ({"micro_batch_size": {"explore": {"max": 10**6}}}, "less than or equal to 256"),
        (
            {"micro_batch_size": 64, "batch_size": 7},
            "micro_batch_size (64) does not divide what each device gets of the batch: 7 sequences of batch_size (7) "
            "over num_devices (1); the nearest that divide it: 7.",
        ),
        ({"micro_batch_size": 5, "batch_size": 8}, "the nearest that divide it: 4 and 8."),
        ({"micro_batch_size": 200, "batch_size": 514}, "the nearest that divide it: 2."),
        ({"micro_batch_size": 5, "batch_size": 8, "mode": "eval"}, "micro_batch_size (5) does not divide"),
        (
            {"batch_size": 64, "num_devices": 3},
            "batch_size (64) must be a multiple of num_devices (3), so that each gets as much; the nearest are 63 and "
            "66",
        ),
        ({"headroom": -0.1}, "headroom"),
        ({"headroom": 0.91}, "headroom"),
        ({"bta": {"enable": False, "max_tile": 2}}, "no meaning when enable is false"),
        ({"bta": {"enable": False, "tiles": [2]}}, "no meaning when enable is false"),
        ({"bta": {"tiles": []}}, "bta.tiles"),
        ({"attention_backends": []}, "attention_backends"),
        ({"attention_backends": ["flash"], "flash_attention": False}, "flash_attention is false"),
        ({"model": MOE, "expert_backends": []}, "expert_backends"),
        ({"model": MOE, "routing": {"kind": "shares", "shares": [1, 1]}}, "routing.shares has 2 entries for 4 experts"),
        ({"model": MOE, "routing": {"kind": "shares", "shares": [6, 2, 1, 1]}}, "exceeds 1 / top_k"),
        ({"training": {"sharding": "zero2"}}, "needs num_devices > 1"),
        ({"training": {"loss": {"chunk_tokens": 1}}}, "chunk_tokens"),
        ({"training": {"optimizer": {"name": "lion"}}}, "or by a target of your own"),
        ({"num_query_groups": []}, "num_query_groups"),
        ({"num_query_groups": [1] * 9}, "num_query_groups"),
        ({"model": {**MODEL, "num_query_groups": [1, 2]}, "num_query_groups": [4]}, "twice"),
        ({"model": moe_with(0)}, "capacity_factor"),
        ({"model": moe_with([1.0, -1])}, "capacity_factors"),
        ({"model": moe_with([1.0]), "capacity_factors": [2]}, "capacity_factor is given as a list twice"),
        ({"capacity_factors": [1.0]}, "capacity_factors given for a model without experts"),
        ({"model": moe_with(1.0), "execution": "graph"}, "need execution 'eager' or 'compile'"),
        ({"model": moe_with([None, 1.0]), "num_devices": 2, "parallelism": {"expert": 2}}, "give one capacity"),
        ({"memory_limit_gib": 0}, "memory_limit_gib"),
        ({"memory_limit_gib": float("nan")}, "memory_limit_gib"),
        ({"tolerance": 0.5}, "tolerance"),
        ({"tolerance": float("inf")}, "tolerance"),
        ({"budget": {"max_trials": 10**6}}, "max_trials"),
    ],
)
def test_each_rule(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(ValidationError) as caught:
        build(**changes)
    assert part in str(caught.value)


def test_choices_of_a_micro_batch() -> None:
    assert (build().micro_batch_size, build().micro_batch_choice) == (None, "explore")
    assert build(batch_size=8).micro_batch_choice == "auto"
    assert build(micro_batch_size="auto").micro_batch_size == "auto"
    assert build(micro_batch_size=8).micro_batch_size == 8
    assert build(micro_batch_size=[2, 4]).micro_batch_size == (2, 4)
    ranged = build(micro_batch_size={"explore": {"min": 2, "max": 9}}).micro_batch_size
    assert isinstance(ranged, ExploreRange)
    assert (ranged.explore.min, ranged.explore.max) == (2, 9)


def test_a_range_need_not_divide_the_batch() -> None:
    request = build(batch_size=23, num_devices=2, micro_batch_size={"explore": {"min": 5, "max": 11}})
    assert (request.devices.batch_share, request.space.micro_batch_sizes) == (11.5, (5, 6, 8, 11))


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({"batch_size": 12}, (1, 2, 3, 4, 6, 12)),
        ({"batch_size": 12, "mode": "eval"}, (1, 2, 3, 4, 6, 12)),
        ({"batch_size": 12, "num_devices": 2}, (1, 2, 3, 6)),
        ({"batch_size": 1024}, (1, 2, 4, 8, 16, 32, 64, 128, 256)),
        ({"batch_size": 12, "num_devices": 2, "micro_batch_size": 3}, (3,)),
        ({"micro_batch_size": "auto"}, (1, 2, 4, 8, 16, 32, 64, 128, 256)),
    ],
)
def test_sizes_divide_a_stated_batch(changes: dict[str, Any], sizes: tuple[int, ...]) -> None:
    request = build(**changes)
    assert request.space.micro_batch_sizes == sizes
    assert request.keeps_batch is ("batch_size" in changes)


@pytest.mark.parametrize(
    ("choice", "sizes"),
    [("explore", LADDER), ([4, 7, 8], (4, 7, 8)), ({"explore": {"min": 5, "max": 20}}, (5, 6, 8, 12, 16, 20))],
)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_an_exploration_a_list_and_a_range_are_independent_of_the_batch(
    choice: Any, sizes: tuple[int, ...], mode: str
) -> None:
    request = build(batch_size=7, num_devices=3, micro_batch_size=choice, mode=mode)
    assert request.space.micro_batch_sizes == sizes
    assert not request.keeps_batch


def test_devices_that_share_sequences_get_more_of_the_batch() -> None:
    request = build(batch_size=8, num_devices=4, micro_batch_size="auto", context_parallel={"sizes": [1, 2, 4]})
    place = request.space.place
    assert [MICRO_BATCH_SIZE.considered_over(size, place) for size in (1, 2, 4)] == [(1, 2), (1, 2, 4), (1, 2, 4, 8)]


def test_variants_are_distinct_models() -> None:
    request = build(num_query_groups=[None, 4, 1])
    assert [model.query_groups for model in request.space.variants()] == [4, 1]
    assert build().space.variants() == (build().model,)


def test_a_list_in_the_model_names_variants() -> None:
    request = build(model={**MODEL, "num_query_groups": [2, 1]})
    assert request.shapes.num_query_groups == 2
    assert [model.query_groups for model in request.space.variants()] == [2, 1]


def test_a_list_of_capacity_factors_names_variants_of_each_attention() -> None:
    request = build(model={**moe_with([None, 1.25]), "num_query_groups": [4, 2]})
    assert request.shapes.moe == build(model=MOE).shapes.moe
    assert [model.variant for model in request.space.variants()] == [(4, None), (4, 1.25), (2, None), (2, 1.25)]
    assert request.space.drops_tokens
    assert not build(model=MOE).space.drops_tokens
    assert not build(model=moe_with(1.25), capacity_factors=[None]).space.drops_tokens


@pytest.mark.parametrize(("factor", "capacity"), [(None, 10), (1.0, 5), (1.1, 6), (0.01, 1)])
def test_a_capacity_is_rounded_up(factor: float | None, capacity: int) -> None:
    moe = build(model=moe_with(factor)).shapes.moe
    assert moe is not None
    assert moe.capacity(10) == capacity


@pytest.mark.parametrize(
    ("alone", "written"),
    [
        ({"training": {"optimizer": "adafactor"}}, {"training": {"optimizer": {"name": "adafactor"}}}),
        ({"training": {"optimizer": "adamw_8bit"}}, {"training": {"optimizer": {"name": "adamw_bnb_8bit"}}}),
        ({"recompute": "full"}, {"recompute": ["full"]}),
        ({"attention_backends": "sdpa"}, {"attention_backends": ["sdpa"]}),
        ({"losses": "library"}, {"losses": ["library"]}),
        (
            {"training": {"lora": {"r": 4, "target_modules": "q_proj"}}},
            {"training": {"lora": {"r": 4, "target_modules": ["q_proj"]}}},
        ),
    ],
)
def test_a_name_alone_is_a_list_of_one_or_the_optimizer_of_that_name(
    alone: dict[str, Any], written: dict[str, Any]
) -> None:
    config = {"hf_config": {"model_type": "llama"}, "hf_seq_length": 16}
    assert ExplorationRequest.model_validate(config | alone) == ExplorationRequest.model_validate(config | written)
