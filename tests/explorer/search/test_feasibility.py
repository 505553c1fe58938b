"""What a failure rules out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bexp.explorer.cost.components import BlockRecompute, Component, ComponentKind
from bexp.explorer.records.measurement import Measurement, Outcome
from bexp.explorer.search.knowledge import MOST_TOO_LARGE, Failures, at_least
from bexp.explorer.surrogate.observations import ObservationLog
from tests.explorer.search.small import candidate, measure, small_state


def attention(size: int, **changes: Any) -> Component:
    made = {"kind": ComponentKind.ATTENTION, "micro_batch_size": size, "backend": "flash", "num_query_groups": 4}
    return Component.model_validate({**made, **changes})


def block(kind: ComponentKind, size: int, **changes: Any) -> Component:
    return Component(kind=kind, micro_batch_size=size, **changes)


FULL = {"recompute": BlockRecompute.FULL}
FFN = ComponentKind.DENSE_FFN
OPTIMIZER = block(ComponentKind.OPTIMIZER, 0)


def ring(size: int, devices: int, layout: str = "ring") -> Component:
    return attention(size, context_parallel_size=devices, context_parallel_layout=layout)


@pytest.mark.parametrize(
    ("one", "failed", "fails"),
    [
        *((attention(size), attention(4), size >= 4) for size in (1, 3, 4, 6)),
        *((attention(8, bta_tile=tile), attention(4, bta_tile=2), tile >= 2) for tile in (1, 2, 4)),
        (attention(2, bta_tile=4), attention(4, bta_tile=2), False),
        (attention(4, bta_tile=2), attention(4, bta_tile=2), True),
        (attention(8), attention(4, bta_tile=2), False),
        (attention(8, bta_tile=4), attention(4), False),
        (attention(8, backend="cudnn"), attention(4), False),
        (attention(8, num_query_groups=2), attention(4), False),
        (attention(8, **FULL), attention(4), False),
        (block(ComponentKind.HEAD, 8), attention(4), False),
        (block(ComponentKind.LAYER, 4, part="mamba"), block(ComponentKind.LAYER, 4, part="wide"), False),
        (OPTIMIZER, OPTIMIZER, True),
        (OPTIMIZER, block(ComponentKind.OPTIMIZER, 1), False),
        (ring(4, 2), ring(2, 2), True),
        (ring(4, 2, "zigzag"), ring(2, 2), False),
        (ring(4, 4), ring(2, 2), False),
        (ring(4, 4), attention(4), False),
        (block(FFN, 1, context_parallel_size=2), block(FFN, 1), False),
        (block(FFN, 1), block(FFN, 1, context_parallel_size=2), True),
    ],
)
def test_a_component_that_failed_rules_out_those_of_its_sort_that_are_at_least_as_large(
    one: Component, failed: Component, fails: bool
) -> None:
    assert at_least(one, failed) is fails


def test_recomputation_helps_where_memory_was_short_and_not_where_it_crashed() -> None:
    recomputed = attention(4, **FULL)
    assert at_least(recomputed, attention(4), broken=True)
    assert not at_least(attention(4), recomputed, broken=True)


def failed(component: Component | None, outcome: Outcome = Outcome.OUT_OF_MEMORY) -> Measurement:
    return Measurement(candidate=candidate(4), outcome=outcome, reason="why", failed_component=component)


def test_a_failed_component_rules_out_the_candidates_that_use_it_or_a_larger_one() -> None:
    state, failures = small_state(), Failures()
    component = next(
        c
        for c in state.table.components
        if c.kind is ComponentKind.ATTENTION and c.micro_batch_size == 2 and c.attention == "cudnn"
    )
    failures.learn(failed(component))
    assert len(failures) == 1
    assert failures.components == {component: "why"}
    failing = failures.failing(state.table, ObservationLog())
    expected = [any(at_least(c, component) for c in d.components) for d in state.table.decompositions]
    assert failing.tolist() == expected
    assert 0 < sum(expected) < len(expected)


@pytest.mark.parametrize(
    ("outcome", "ruled_out"), [(Outcome.CRASHED, True), (Outcome.TIMED_OUT, True), (Outcome.OUT_OF_MEMORY, False)]
)
def test_only_faults_rule_out_recomputation(outcome: Outcome, ruled_out: bool) -> None:
    failures = Failures()
    failures.learn(failed(attention(4), outcome))
    assert failures._fails(attention(4, recompute=BlockRecompute.FULL), ObservationLog()) is ruled_out


def test_a_component_that_was_measured_does_not_fail() -> None:
    state, failures = small_state(), Failures()
    row = state.table.row[candidate(4)]
    component = state.missing(row)[1]
    log = ObservationLog()
    log.add(0, measure(state, (component,), candidate(4)).components)
    failures.learn(failed(component))
    assert not failures._fails(component, log)


def test_a_candidate_that_failed_as_a_whole_is_rejected_alone() -> None:
    state, failures = small_state(), Failures()
    failures.learn(failed(None))
    failures.learn(failed(None).model_copy(update={"reason": "later"}))
    assert failures.candidates == {candidate(4): "why"}
    required = np.arange(len(state.table.candidates), dtype=float)
    rejected = failures.rejected(state.table, required)
    assert np.flatnonzero(rejected).tolist() == [state.table.row[candidate(4)]]


def test_a_whole_model_that_was_too_large_rejects_all_that_need_as_much() -> None:
    state, failures = small_state(), Failures()
    failures.reject(candidate(2), "too large", too_large=True)
    required = np.arange(len(state.table.candidates), dtype=float)
    row = state.table.row[candidate(2)]
    assert failures.rejected(state.table, required).tolist() == [i >= row for i in range(len(required))]
    ran = [row, len(required) - 1]  # what ran whole fits, unless it was too large another time
    found = failures.rejected(state.table, required, ran=ran)
    assert found.tolist() == [row <= i < len(required) - 1 for i in range(len(required))]
    assert not failures.failing(state.table, ObservationLog()).any()


def test_what_the_error_of_memory_explains_rejects_others_only_after_a_few() -> None:
    state, failures = small_state(), Failures()
    required = np.arange(len(state.table.candidates), dtype=float)
    for number, each in enumerate(state.table.candidates[:MOST_TOO_LARGE], 1):
        failures.reject(each, "too large", too_large=True)
        rejected = failures.rejected(state.table, required, failures.too_large(state.table))
        assert rejected.sum() == (number if number < MOST_TOO_LARGE else required.size)
