"""Candidates, components and plans that share sequences, and those that were stored before any could."""

from __future__ import annotations

import pytest

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.records.trial import TrialTask
from tests.workers.profiler.samples import candidate, components_of, plan, whole_model_plan

STORED = {"micro_batch_size": 2, "attention_backend": "flash", "num_query_groups": 2}


def test_a_layout_belongs_to_several_devices() -> None:
    old = Candidate.model_validate(STORED)
    assert (old.context_parallel_size, old.context_parallel_layout) == (1, None)
    assert "context" not in old.describe()
    assert "context_parallel=4:zigzag" in candidate(layout="zigzag", size=4).describe()
    for fields in ({"context_parallel_size": 2}, {"context_parallel_layout": "ring"}):
        with pytest.raises(ValueError, match="context_parallel_layout"):
            Candidate.model_validate(STORED | fields)
    with pytest.raises(ValueError, match="belongs to attention"):
        Component(kind=ComponentKind.HEAD, micro_batch_size=1, context_parallel_size=2, context_parallel_layout="ring")


def test_keys_tell_shares_apart_and_are_as_before_without() -> None:
    before = [component.key for component in components_of(candidate())]
    assert before[:2] == ["embedding(m=2)", "attention(m=2,flash,groups=2)"]
    after = [component.key for component in components_of(candidate(layout="striped", size=4))]
    assert after[:2] == ["embedding(m=1,cp=2)", "attention(m=2,flash,groups=2,cp=4:striped)"]
    assert after[-1] == before[-1] == "optimizer(groups=2)"


def test_what_is_not_attention_is_shared_by_candidates_with_as_many_tokens_a_device() -> None:
    alone, spread = components_of(candidate(1)), components_of(candidate(4, layout="zigzag", size=4))
    assert {c.kind for c in set(spread) - set(alone)} == {ComponentKind.ATTENTION}
    other = components_of(candidate(4, layout="ring", size=4))
    assert len(set(spread) & set(other)) == len(spread) - 1


def test_a_plan_has_as_many_processes_as_its_rings_need() -> None:
    spread = candidate(layout="ring", size=2)
    attention = components_of(spread)[1:2]
    assert plan(spread, attention, num_processes=4).context_parallel_sizes == (2,)
    assert plan(spread, components_of(spread)[:1]).num_processes == 1, "its share is all that an embedding needs"
    assert TrialTask.model_validate_json(plan(candidate()).model_dump_json(exclude_defaults=True)).num_processes == 1
    with pytest.raises(ValueError, match="no multiple of context_parallel_size 2"):
        plan(spread, attention, num_processes=3)
    with pytest.raises(ValueError, match="no multiple of context_parallel_size 2"):
        whole_model_plan(spread)
