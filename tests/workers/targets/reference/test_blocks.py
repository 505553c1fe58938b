"""Every block against a plain float64 reference, over the varieties of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from bexp.explorer.cost.components import BlockRecompute
from bexp.explorer.model.model import ModelSpec
from bexp.workers.targets.reference.attention_block import AttentionBlock
from bexp.workers.targets.reference.block import ResidualBlock
from bexp.workers.targets.reference.ffn_block import DenseFFN, MoEFFN
from tests.bexp.kernels.references import assert_same_values, relative_error
from tests.workers.targets.reference import references
from tests.workers.targets.reference.models import CPU, outcome, shake, small_model, small_moe

TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}
# bfloat16: values are rounded to 2^-9 of themselves after each of the block's operations, forward and backward;
# the norm of what that leaves stays below four roundings.


def attention(model: ModelSpec, backend: str = "flash", **fields: Any) -> AttentionBlock:
    settings: dict[str, Any] = {"bta_tile": None, "recompute": BlockRecompute.NONE, "training": True, **fields}
    return AttentionBlock(model, backend=backend, device=CPU, **settings)


def check(
    model: ModelSpec,
    block: ResidualBlock,
    reference: Callable[[Mapping[str, Tensor], Tensor], Tensor],
) -> None:
    generator = torch.Generator().manual_seed(3)
    shake(block, generator)
    dtype = next(block.parameters()).dtype
    x = torch.randn(2, model.seq_length, model.hidden_size, generator=generator).to(dtype)
    actual = outcome(block, block, x)

    p64 = {name: p.detach().double().requires_grad_() for name, p in block.named_parameters()}
    x64 = x.double().requires_grad_()
    out = reference(p64, x64)
    weight = torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out).double()
    (out * weight).sum().backward()
    expected = {"out": out, "x": x64.grad, **{name: p.grad for name, p in p64.items()}}
    errors = {name: relative_error(actual[name], wanted) for name, wanted in expected.items()}
    assert max(errors.values()) <= TOLERANCES[model.dtype], errors


@pytest.mark.parametrize("backend", ["flash", "math"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_query_groups": 2},
        {"num_query_groups": 1, "qkv_bias": True},
        {"rotary_fraction": 0.5, "norm": "layernorm", "attention_output_bias": True, "qkv_bias": True},
        {"rotary_fraction": 0.25, "num_query_groups": 2, "qk_norm": "head"},
        {"qk_norm": "head", "num_query_groups": 2},
        {"qk_norm": "full", "num_query_groups": 2},
        {"position": "none"},
        {"position": "learned", "norm": "layernorm", "qk_norm": "full"},
        {"num_query_groups": 2, "dtype": "bfloat16"},
        {"qk_norm": "head", "dtype": "bfloat16"},
    ],
    ids=str,
)
def test_attention_block(backend: str, fields: dict[str, Any]) -> None:
    model = small_model(**fields)
    check(model, attention(model, backend), lambda p, x: references.attention_block(model, p, x))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"gated_mlp": False, "activation": "gelu", "mlp_bias": True, "norm": "layernorm"},
        {"activation": "relu", "mlp_bias": True},
        {"dtype": "bfloat16"},
    ],
    ids=str,
)
def test_dense_ffn(fields: dict[str, Any]) -> None:
    model = small_model(**fields)
    block = DenseFFN(model, recompute=BlockRecompute.NONE, device=CPU, training=True)
    check(model, block, lambda p, x: references.dense_ffn(model, p, x))


@pytest.mark.parametrize("backend", ["loop", "grouped_mm", "bmm"])
@pytest.mark.parametrize(
    ("moe", "fields"),
    [
        ({}, {}),
        ({"top_k": 1}, {"gated_mlp": False, "activation": "gelu"}),
        ({"norm_topk_prob": True, "shared_expert_ffn_hidden_size": 40}, {}),
        ({"shared_expert_ffn_hidden_size": 40, "shared_expert_gate": True}, {"mlp_bias": True, "norm": "layernorm"}),
        ({"top_k": 6, "norm_topk_prob": True}, {"activation": "relu"}),
        ({"norm_topk_prob": True}, {"dtype": "bfloat16"}),
        ({"capacity_factor": 0.7, "shared_expert_ffn_hidden_size": 40}, {}),
        ({"capacity_factor": 0.5, "top_k": 1}, {}),
    ],
    ids=str,
)
def test_moe_ffn(backend: str, moe: dict[str, Any], fields: dict[str, Any]) -> None:
    model = small_model(moe=small_moe(**moe), **fields)
    assert model.moe is not None
    block = MoEFFN(model, backend=backend, recompute=BlockRecompute.NONE, device=CPU, training=True)
    scores = torch.rand(2 * model.seq_length, 6, generator=torch.Generator().manual_seed(5))
    routes = scores.topk(model.moe.top_k).indices
    block.set_routes(routes)
    check(model, block, lambda p, x: references.moe_ffn(model, p, x, routes))


def test_the_router_goes_where_the_routes_say() -> None:
    model = small_model(moe=small_moe())
    block = MoEFFN(model, backend="loop", recompute=BlockRecompute.NONE, device=CPU, training=True)
    with torch.no_grad():
        block.w_router[0].fill_(100.0)  # experts 0 and 1 would win every token with a positive sum, lose the others
        block.w_router[1].fill_(100.0)
    wanted = torch.tensor([[2, 3], [5, 0], [4, 1]])
    block.set_routes(wanted)
    routes, weights, _ = block._route(torch.randn(3, 48, generator=torch.Generator().manual_seed(0)))
    assert [set(row) for row in routes.tolist()] == [set(row) for row in wanted.tolist()]
    assert weights.shape == (3, 2)


@pytest.mark.parametrize("recompute", [BlockRecompute.SELECTIVE, BlockRecompute.FULL])
@pytest.mark.parametrize("tile", [None, 1, 4])
@pytest.mark.parametrize("fields", [{}, {"qk_norm": "head", "num_query_groups": 2}], ids=str)
def test_recomputation_changes_nothing(recompute: BlockRecompute, tile: int | None, fields: dict[str, Any]) -> None:
    model = small_model(**fields)
    generator = torch.Generator().manual_seed(0)
    plain, again = attention(model), attention(model, recompute=recompute, bta_tile=tile)
    shake(plain, generator)
    again.load_state_dict(plain.state_dict())
    x = torch.randn(4, 12, 48, generator=generator)
    first, second = outcome(plain, plain, x), outcome(again, again, x)
    for name, value in first.items():
        assert relative_error(second[name], value) <= 1e-5, name


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_full_recomputation_of_an_ffn_changes_nothing(kind: str) -> None:
    model = small_model(moe=small_moe()) if kind == "moe" else small_model()

    def build(recompute: BlockRecompute) -> ResidualBlock:
        if kind == "dense":
            return DenseFFN(model, recompute=recompute, device=CPU, training=True)
        block = MoEFFN(model, backend="loop", recompute=recompute, device=CPU, training=True)
        block.set_routes(torch.tensor([[0, 3], [3, 5], [1, 0]]).repeat(8, 1))
        return block

    plain, again = build(BlockRecompute.NONE), build(BlockRecompute.FULL)
    again.load_state_dict(plain.state_dict())
    x = torch.randn(2, 12, 48, generator=torch.Generator().manual_seed(0))
    first, second = outcome(plain, plain, x), outcome(again, again, x)
    assert second.keys() == first.keys()
    assert_same_values(second.values(), first.values())


@pytest.mark.parametrize("recompute", list(BlockRecompute))
def test_eval_keeps_no_graph(recompute: BlockRecompute) -> None:
    model = small_model()
    x = torch.randn(4, 12, 48, generator=torch.Generator().manual_seed(0))
    block = attention(model, training=False, recompute=recompute, bta_tile=2)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda t: t):
        out = block(x)
    assert not out.requires_grad
    assert not kept
    trained = attention(model)
    trained.load_state_dict(block.state_dict())
    torch.testing.assert_close(out, trained(x).detach())


def test_branch_and_residual() -> None:
    model = small_model()
    block = attention(model, bta_tile=2)
    x = torch.randn(4, 12, 48, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(block(x), x + block.branch(x))
    torch.testing.assert_close(block.residual(x), x + block.branch(x))
