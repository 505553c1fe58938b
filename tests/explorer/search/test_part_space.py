"""The space of candidates of a model described by its parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.cost.composition import Composition, predict_memory
from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.dimensions.place import EmptySpaceError
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.hardware import BackendSupport
from bexp.explorer.model.target import OWN_ATTENTION
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.search.legal_space import (
    OPTIMISTIC_ACTIVATIONS,
    base_candidates,
    enumerate_candidates,
    explored_models,
    prune_space,
)
from bexp.explorer.search.relaxations import find_relaxations
from tests.explorer.cost.described import device, parts, request
from tests.explorer.simulator import report

ON_GPU = {"target": "transformers", "model": None, "hf_config": {"model_type": "llama"}, "hf_seq_length": 32}


def test_activations_go_to_the_host_if_it_is_named_and_in_eager_execution_alone() -> None:
    asked = request(**ON_GPU, micro_batch_size=2, recompute=["none", "offload"], execution="explore")
    found = enumerate_candidates(asked, report(), parts())
    assert {c.execution for c in found.candidates if c.recompute is Recompute.OFFLOAD} == {Execution.EAGER}
    assert [c.recompute for c in base_candidates(asked, report(), parts())][-1] is Recompute.OFFLOAD
    unnamed = enumerate_candidates(request(**ON_GPU, micro_batch_size=2), report(), parts())
    assert Recompute.OFFLOAD not in {c.recompute for c in unnamed.candidates}


def test_activations_go_to_the_host_if_nothing_else_may_fit() -> None:
    asked = request(**ON_GPU, micro_batch_size=[64])
    model = parts(kinds=tuple(kind.model_copy(update={"saved_bytes_per_token": 4e5}) for kind in parts().kinds))
    table = Composition(
        enumerate_candidates(request(**ON_GPU, micro_batch_size=[64], recompute=["full"]), device(), model).candidates,
        model,
        asked,
    )
    limit = int(0.9 * predict_memory(table, device().hardware, activation_share=OPTIMISTIC_ACTIVATIONS).min())
    cramped = device().model_copy(
        update={"hardware": device().hardware.model_copy(update={"memory_limit_bytes": limit})}
    )
    found_elsewhere = len(enumerate_candidates(asked, cramped, model).candidates)
    found = prune_space(model, asked, cramped)
    assert {c.recompute for c in found.legal.candidates} == {Recompute.OFFLOAD}
    assert found.num_predicted_out == found_elsewhere, "whatever leaves them on the device"
    assert found.table is not None
    assert found.bases[-1] in found.table.row, "the only base that may fit"
    named = asked.model_copy(update={"recompute": (Recompute.FULL,)})
    assert prune_space(model, named, cramped).table is None, "a request that names its policies gets those"
    assert [one.change for one in find_relaxations(named, cramped, model)] == [
        "micro_batch_size 8",
        "recompute offload",
    ]
    for elsewhere in ({"trainer": "transformers"}, {"device_kind": "cpu"}):
        cannot = request(**ON_GPU, micro_batch_size=[64], batch_size=64, **elsewhere)
        assert prune_space(model, cannot, cramped).table is None


def test_what_the_code_cannot_run_is_not_in_the_space() -> None:
    plain = device(policies=("none", "full"), tiles=False)
    (model,) = explored_models(request(), plain)
    space = enumerate_candidates(request(micro_batch_size=[2], bta={"enable": None}), plain, model).candidates
    assert {c.recompute for c in space} == {Recompute.NONE, Recompute.FULL}
    assert [c.recompute for c in base_candidates(request(), plain, model)] == [Recompute.NONE, Recompute.FULL]


def test_a_policy_that_the_code_cannot_run_is_refused_with_the_reason() -> None:
    why = {"checkpointing": "its quantised layers keep their inputs", "groups_2": "no groups"}
    plain = device(policies=("none",), unavailable=why)
    (model,) = explored_models(request(), plain)
    with pytest.raises(EmptySpaceError, match=r"recompute 'full', 'groups_2': its quantised layers keep .*; no groups"):
        enumerate_candidates(request(recompute=["full", "groups_2"]), plain, model)
    bare = device(policies=("none",), unavailable={})
    with pytest.raises(EmptySpaceError, match="recompute 'full': none of them can be run with transformers"):
        enumerate_candidates(request(recompute=["full"]), bare, explored_models(request(), bare)[0])


def whole(**changes: Any) -> dict[str, Any]:
    """What describes a model that is measured whole."""
    return {"layers": (), "kinds": (), "policies": ("none",), "tiles": False, **changes}


def test_a_model_that_is_measured_whole_is_its_shell_in_each_of_its_settings() -> None:
    found = device(**whole(settings=("compile=false", "compile=true")))
    own = BackendSupport(name=OWN_ATTENTION, usable=True)
    found = found.model_copy(update={"attention_backends": (own,), "default_attention": OWN_ATTENTION})
    asked = request(micro_batch_size=[2, 4], target="my-gpt", model=None)
    (model,) = explored_models(asked, found)
    space = enumerate_candidates(asked, found, model)
    assert [c.describe() for c in space.candidates] == [
        f"micro_batch_size={m} compile={choice}" for m in (2, 4) for choice in ("false", "true")
    ]
    assert [c.describe() for c in base_candidates(asked, found, model)] == ["micro_batch_size=2 compile=false"]
    table = Composition(space.candidates, model, asked)
    assert {c.key for c in table.components} == {
        *(f"shell(m={m},compile={choice})" for m in (2, 4) for choice in ("false", "true")),
        "optimizer()",
    }
    peak_K = np.arange(1.0, 1 + len(table.components))
    saved_C, transient_C = table.activation_bytes(np.zeros(len(peak_K)), peak_K, peak_K)
    optimizer = peak_K[table.column[Component(kind=ComponentKind.OPTIMIZER, micro_batch_size=0)]]
    expected = [max(peak_K[table.column[d.head]], optimizer) for d in table.decompositions]
    assert np.allclose(saved_C + transient_C, expected)


def test_executions_that_the_device_or_the_experts_cannot_have_are_left_out() -> None:
    own = {"target": "transformers", "model": None, "hf_config": {"model_type": "llama"}, "hf_seq_length": 32}
    named = {**own, "micro_batch_size": 2, "recompute": ["none"]}
    experts = tuple(BackendSupport(name=name, usable=True) for name in ("eager", "grouped_mm"))
    found = report().model_copy(update={"expert_backends": experts, "default_experts": "grouped_mm"})

    def tried(found: DeviceReport, **fields: Any) -> set[tuple[Any, Any]]:
        space = enumerate_candidates(request(**named, **fields), found, parts())
        return {(candidate.expert_backend, candidate.execution) for candidate in space.candidates}

    both = ["eager", "graph"]
    assert tried(found, execution=both) == {("eager", "eager"), ("grouped_mm", "eager"), ("grouped_mm", "graph")}
    with pytest.raises(EmptySpaceError, match="'eager', which waits for the device"):
        tried(found, execution="graph", expert_backends=["eager"])
    supports = tuple(
        BackendSupport(name=one, usable=not one.replays, reason="no graphs here" if one.replays else None)
        for one in Execution
    )
    without = found.model_copy(update={"choices": {"execution": supports}})
    assert {execution for _, execution in tried(without, execution=both)} == {"eager"}
    assert base_candidates(request(**named, execution=both), without, parts())[0].execution is Execution.EAGER
    with pytest.raises(EmptySpaceError, match="no graphs here"):
        tried(without, execution="graph")


def test_a_loss_that_waits_for_the_device_is_not_replayed() -> None:
    own = {"target": "transformers", "model": None, "hf_config": {"model_type": "llama"}, "hf_seq_length": 32}
    named = {**own, "micro_batch_size": 2, "recompute": ["none"]}
    usable = tuple(BackendSupport(name=name, usable=True) for name in ("library", "liger"))
    found = report().model_copy(update={"choices": {"loss": usable}})
    asked = request(**named, execution=["eager", "graph", "compile+graph"], losses=["library", "liger"])
    tried = {(one.loss, one.execution) for one in enumerate_candidates(asked, found, parts()).candidates}
    assert tried == {("library", "eager"), ("library", "graph"), ("library", "compile+graph"), ("liger", "eager")}
    with pytest.raises(EmptySpaceError, match="'graph' with the liger loss, which waits for the device"):
        enumerate_candidates(request(**named, execution="graph", losses=["liger"]), found, parts())
