"""Recomputation policies: which are candidates, what they mean for a block, and what they are predicted to cost."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from bexp.explorer.cost.components import ComponentKind
from bexp.explorer.cost.decomposition import Decomposer
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.recompute import ON_DEVICE, Recompute
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.legal_space import enumerate_candidates
from tests.explorer.shapes import shapes
from tests.explorer.simulator import report

DENSE = shapes(9, 2048, 8192, heads=16, vocab=32000, length=4096, num_query_groups=4)
MOE: dict[str, Any] = {
    **DENSE,
    "moe": {"num_experts": 32, "top_k": 4, "expert_ffn_hidden_size": 1024, "first_k_dense": 1},
}


def request(model: dict[str, Any] = MOE, **changes: Any) -> ExplorationRequest:
    return ExplorationRequest.model_validate({"model": model, **changes})


def candidates(req: ExplorationRequest) -> tuple[Candidate, ...]:
    return enumerate_candidates(req, report(experts=req.shapes.moe is not None), req.shapes).candidates


def test_a_tile_takes_no_policy_that_keeps_a_part_of_attention() -> None:
    found = {c.recompute for c in candidates(request()) if c.bta_tile is not None}
    assert found == set(ON_DEVICE) - {Recompute.SELECTIVE, Recompute.QKV, Recompute.PROJECTIONS}
    with pytest.raises(ValidationError, match="'qkv' and 'projections' alone leaves nothing"):
        request(bta={"enable": True}, recompute=["projections", "qkv"])
    req = request(bta={"enable": True}, recompute=["qkv", "activations"])
    assert {c.recompute for c in candidates(req)} == {Recompute.ACTIVATIONS}


def test_no_two_candidates_are_the_same_step() -> None:
    for model in (DENSE, MOE):
        req = request(model, micro_batch_size=[4], attention_backends=["cudnn"])
        decompose = Decomposer(req.shapes, training=True)
        steps = [decompose(candidate) for candidate in candidates(req)]
        assert len(set(steps)) == len(steps)


def test_experts_are_recomputed_where_there_are_some() -> None:
    assert Recompute.EXPERTS not in {c.recompute for c in candidates(request(DENSE))}
    with pytest.raises(ValidationError, match="'experts' given for a model without experts"):
        request(DENSE, recompute=["none", "experts"])


def test_a_compiler_chooses_operations_by_itself() -> None:
    found = {c.recompute for c in candidates(request(execution="compile"))}
    assert found == {policy for policy in ON_DEVICE if not policy.by_operation}
    with pytest.raises(ValidationError, match="'activations' needs execution 'eager'"):
        request(execution="compile", recompute=["none", "activations"])


def test_eval_mode_recomputes_nothing() -> None:
    req = request(mode="eval", recompute=["none", "activations", "qkv"])
    assert {c.recompute for c in candidates(req)} == {Recompute.NONE}
    with pytest.raises(ValidationError, match="must allow 'none' in eval mode"):
        request(mode="eval", recompute=["activations"])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"recompute": ["layers_10"]}, "the model has 9 layers; the nearest policy is 'full'"),
        ({"recompute": ["groups_10"]}, "the model has 9 layers; the nearest policy is 'groups_9'"),
        ({"recompute": ["groups_1"]}, "a group has at least two layers"),
        ({"recompute": ["layers_0"]}, "'layers_N' or 'groups_N'"),
        ({"recompute": ["group_2"]}, "'layers_N' or 'groups_N'"),
        ({"recompute": ["groups_2"], "training": {"sharding": "zero3"}, "num_devices": 2}, "with 'zero3'"),
        ({"recompute": ["layers_2"], "num_devices": 8, "parallelism": {"pipeline": 2}}, "not for meshes"),
    ],
)
def test_a_number_that_a_model_cannot_have_is_refused_with_the_nearest(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        request(**fields)


def test_policies_share_components() -> None:
    """Ten policies need few more components than six did: five of an attention block, four of each FFN."""
    req = request(micro_batch_size=[4], bta={"enable": False}, attention_backends=["cudnn"], expert_backends=["loop"])
    decompose = Decomposer(req.shapes, training=True)
    found = {c for candidate in candidates(req) for c in decompose(candidate).components}
    kinds = [c.kind for c in found]
    assert kinds.count(ComponentKind.ATTENTION) == 5
    assert kinds.count(ComponentKind.DENSE_FFN) == kinds.count(ComponentKind.MOE_FFN) == 4
