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
