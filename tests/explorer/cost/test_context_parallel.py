"""Devices that share sequences: which spaces there are, and what a step then costs."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from pydantic import ValidationError

from bexp.explorer.cost.composition import Composition, predict_component_table
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.context_parallel import CONTEXT_PARALLEL, LAYOUTS, Sharing, busiest_pairs, refuse_layout
from bexp.explorer.dimensions.micro_batch_size import MICRO_BATCH_SIZE
from bexp.explorer.dimensions.place import EmptySpaceError
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.alternatives import accumulate
from bexp.explorer.search.legal_space import enumerate_candidates
from bexp.kernels.context_parallel.layouts import context_parallel_layout
from tests.explorer.long_sequences import MODEL, SMALL, request
from tests.explorer.simulator import report


def sharings(req: ExplorationRequest, rep: DeviceReport) -> set[tuple[int, str | None]]:
    space = enumerate_candidates(req, rep, req.shapes)
    return {(c.context_parallel_size, c.context_parallel_layout) for c in space.candidates}


def candidate(m: int, size: int = 1, layout: str | None = None) -> Candidate:
    return Candidate(
        micro_batch_size=m,
        attention_backend="cudnn",
        num_query_groups=4,
        context_parallel_size=size,
        context_parallel_layout=layout,
    )


# -- requests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"sizes": [3]}, "3 does not divide num_devices (4)"),
        ({"sizes": []}, "context_parallel.sizes"),
        ({"sizes": [0]}, "context_parallel.sizes"),
        ({"sizes": "all"}, "context_parallel.sizes"),
        ({"context_parallel": {"layouts": ["spiral"]}}, "context_parallel.layouts"),
        ({"sizes": [4], "model": {**MODEL, "seq_length": 4098}}, "the ring layout over 4 devices takes multiples of 4"),
        (
            {"sizes": [2], "context_parallel": {"layouts": ["zigzag"]}, "model": {**MODEL, "seq_length": 4098}},
            "the zigzag layout over 2 devices takes multiples of 4 tokens, not 4098",
        ),
        (
            {"sizes": [1, 4], "batch_size": 3, "micro_batch_size": 1},
            "batch_size (3) must be a multiple of num_devices (4), so that each gets as much; the nearest are 4",
        ),
        ({"sizes": [2], "batch_size": 5, "micro_batch_size": "auto"}, "a multiple of the number of groups"),
        ({"sizes": "explore", "num_devices": 64, "micro_batch_size": "explore", "recompute": None}, "restrict sizes"),
    ],
)
def test_sizes_that_cannot_be_are_refused_with_the_reason(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(ValidationError) as caught:
        request(**changes)
    assert part in str(caught.value).replace("\n", ".")


def test_without_being_asked_for_a_sequence_has_a_device_to_itself() -> None:
    plain = ExplorationRequest.model_validate({"model": MODEL, **SMALL})
    assert plain.devices.context_parallel_sizes == (1,)
    assert plain.devices.needed() == 1, "num_devices is planned for, from one device's profile"
    assert sharings(plain, report(experts=False, num_devices=4)) == {(1, None)}
    stored = plain.model_dump(mode="json", exclude={"context_parallel"})
    assert ExplorationRequest.model_validate(stored) == plain


def test_explore_takes_every_divisor_that_lengths_and_batch_admit() -> None:
    assert request("explore", num_devices=12).devices.context_parallel_sizes == (1, 2, 4)
    few = request("explore", num_devices=8, batch_size=2, micro_batch_size="auto")
    assert few.devices.context_parallel_sizes == (4, 8)
    short = request("explore", model={**MODEL, "seq_length": 4098})
    assert [(s.size, s.layout) for s in CONTEXT_PARALLEL.considered(short.space.place)] == [
        (1, None),
        (2, "ring"),
        (2, "striped"),
    ]


def test_a_worker_needs_devices_for_the_largest_listed_size() -> None:
    assert request((1, 2)).devices.needed() == 2
    assert request((4, 2)).devices.needed(1) == 4
    assert request("explore").devices.needed() == 2
    assert [request("explore").devices.needed(n) for n in (2, 3, 4, 8)] == [2, 2, 4, 4]


# -- the space -----------------------------------------------------------------------------------------------------


def test_sizes_and_layouts_multiply_the_space_and_compose_with_the_rest() -> None:
    rep = report(experts=False, num_devices=4)
    alone = enumerate_candidates(request((1,)), rep, request().shapes).candidates
    found = enumerate_candidates(request(), rep, request().shapes).candidates
    assert len(found) == 7 * len(alone)
    assert len(set(found)) == len(found)
    assert sharings(request(), rep) == {(1, None), *product((2, 4), LAYOUTS)}
    assert {c.bta_tile for c in found if c.context_parallel_size == 4} == {None, 1, 2, 4}
    assert [c for c in found if c.context_parallel_size == 1] == list(alone), "in the same order"


def test_layouts_are_dropped_where_the_length_refuses_them() -> None:
    rep = report(experts=False, num_devices=4)
    odd = request((1, 4), model={**MODEL, "seq_length": 4100})
    assert sharings(odd, rep) == {(1, None), (4, "ring"), (4, "striped")}


def test_no_more_devices_share_than_the_profiler_has() -> None:
    assert sharings(request("explore"), report(experts=False, num_devices=2)) == {(1, None), *product((2,), LAYOUTS)}
    assert sharings(request("explore"), report(experts=False)) == {(1, None)}
    with pytest.raises(EmptySpaceError, match="shared by 2 devices need as many; this worker's profiler has 1"):
        sharings(request((2, 4)), report(experts=False))


def test_auto_follows_the_groups() -> None:
    req = request((1, 4), micro_batch_size="auto", batch_size=8, num_devices=4)
    sizes = [MICRO_BATCH_SIZE.considered_over(size, req.space.place) for size in (1, 4)]
    assert sizes == [(1, 2), (1, 2, 4, 8)]
    space = enumerate_candidates(req, report(experts=False, num_devices=4), req.shapes).candidates
    assert {c.micro_batch_size for c in space if c.context_parallel_size == 1} == {1, 2}
    assert {c.micro_batch_size for c in space if c.context_parallel_size == 4} == {1, 2, 4, 8}


# -- arithmetic ----------------------------------------------------------------------------------------------------


def test_the_batch_is_micro_batch_times_accumulation_times_groups() -> None:
    req = request(batch_size=64, num_devices=4)
    assert accumulate(req, candidate(4)) == (4, ())
    assert accumulate(req, candidate(4, 2, "ring")) == (8, ())
    assert accumulate(req, candidate(4, 4, "ring")) == (16, ())
    assert accumulate(request(batch_size=10), candidate(4, 2, "ring")) == (None, (8, 16))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("size", "seq_length"), [(2, 8), (4, 16), (4, 64), (3, 36)])
def test_the_busiest_device_is_that_of_the_kernels(layout: str, size: int, seq_length: int) -> None:
    kernel = context_parallel_layout(layout)
    each = [kernel.num_pairs(rank, size, seq_length, causal=True) for rank in range(size)]
    assert busiest_pairs(Sharing(size, layout), seq_length).attended == max(each)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lengths_are_refused_as_the_kernels_refuse_them(layout: str) -> None:
    kernel = context_parallel_layout(layout)
    for size, seq_length in product((2, 3, 4), range(1, 30)):
        assert (refuse_layout(layout, size, seq_length) is None) is (kernel.refusal(seq_length, size) is None)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("backend", ["flash", "math"])
def test_more_devices_a_sequence_need_less_memory_each(mode: str, backend: str) -> None:
    for loss in ("chunked", "full"):
        req = request(mode=mode, recompute=["none"], training={"loss": {"kind": loss}}, attention_backends=[backend])
        chosen = [candidate(2), candidate(2, 2, "zigzag"), candidate(2, 4, "zigzag")]
        chosen = [c.model_copy(update={"attention_backend": backend}) for c in chosen]
        table = Composition(chosen, req.shapes, req)
        saved, transient = table.activation_bytes(*predict_component_table(table))
        total = saved + transient
        assert total[0] > total[1] > total[2]
        if mode == "train":
            assert saved[0] > 1.5 * saved[1] > 2.2 * saved[2], "activations follow the tokens of a device"


def test_state_is_sharded_over_all_devices_whatever_shares_sequences() -> None:
    req = request(training={"sharding": "zero3"})
    parts = {Composition([candidate(2, s, ly)], req.shapes, req).static_parts(0) for s, ly in ((1, None), (2, "ring"))}
    assert len(parts) == 1
    assert req.devices.optimizer_shards == 4
