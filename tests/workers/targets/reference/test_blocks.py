"""Every block against a plain float64 reference, and recomputed: the same numbers, and no kernel run in vain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from bexp.explorer.cost.components import BlockRecompute, Component, ComponentKind
from bexp.explorer.cost.decomposition import Decomposer
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.recompute import ON_DEVICE, Recompute
from bexp.explorer.model.model import LayerKind, ModelSpec
from bexp.explorer.request.request import ExplorationRequest
from bexp.workers.targets.reference.attention_block import AttentionBlock
from bexp.workers.targets.reference.block import ResidualBlock
from bexp.workers.targets.reference.decoder import DecoderLayer, DecoderModel
from bexp.workers.targets.reference.ffn_block import DenseFFN, MoEFFN
from tests.bexp.kernels.references import assert_same_values, relative_error
from tests.workers.targets.reference import references
from tests.workers.targets.reference.models import CPU, outcome, shake, small_model, small_moe

TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}
# bfloat16: values are rounded to 2^-9 of themselves after each of the block's operations, forward and backward;
# the norm of what that leaves stays below four roundings.


def attention(
    model: ModelSpec, backend: str = "flash", recompute: BlockRecompute = BlockRecompute.NONE, **fields: Any
) -> AttentionBlock:
    settings: dict[str, Any] = {"bta_tile": None, "training": True, **fields}
    return AttentionBlock(model, backend=backend, recompute=recompute, device=CPU, **settings)


def check(model: ModelSpec, block: ResidualBlock, reference: Callable[[Mapping[str, Tensor], Tensor], Tensor]) -> None:
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


BY_OPERATION = (BlockRecompute.ACTIVATIONS, BlockRecompute.PROJECTIONS)
OF_ATTENTION = tuple(each for each in BlockRecompute if each is not BlockRecompute.NONE)
OF_FFN = (*BY_OPERATION, BlockRecompute.FULL, BlockRecompute.TO_THE_END)
ROUTES = torch.tensor([[0, 3], [3, 5], [1, 0]]).repeat(16, 1)  # experts 2 and 4 get nothing


def experts(model: ModelSpec, backend: str, recompute: BlockRecompute) -> MoEFFN:
    block = MoEFFN(model, backend=backend, recompute=recompute, device=CPU, training=True)
    block.set_routes(ROUTES)
    return block


def hidden_states(model: ModelSpec) -> Tensor:
    x = torch.randn(4, model.seq_length, model.hidden_size, generator=torch.Generator().manual_seed(1))
    return x.to(torch.bfloat16 if model.dtype == "bfloat16" else torch.float32)


def check_numbers(
    build: Callable[[BlockRecompute], ResidualBlock], model: ModelSpec, choices: tuple[BlockRecompute, ...] = OF_FFN
) -> None:
    plain = build(BlockRecompute.NONE)
    shake(plain, torch.Generator().manual_seed(0))
    x = hidden_states(model)
    expected = outcome(plain, plain, x)
    for recompute in choices:
        block = build(recompute)
        block.load_state_dict(plain.state_dict())
        actual = outcome(block, block, x)
        assert actual.keys() == expected.keys()
        assert_same_values(actual.values(), expected.values())


@pytest.mark.parametrize("backend", ["flash", "math"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_query_groups": 2, "qkv_bias": True},
        {"num_query_groups": 1, "norm": "layernorm", "rotary_fraction": 0.5, "attention_output_bias": True},
        {"num_query_groups": 2, "qk_norm": "head"},
        {"num_query_groups": 2, "qk_norm": "full", "position": "none"},
        {"dtype": "bfloat16"},
    ],
    ids=str,
)
def test_attention_is_the_same(backend: str, fields: dict[str, Any]) -> None:
    model = small_model(**fields)
    check_numbers(lambda recompute: attention(model, backend, recompute), model, OF_ATTENTION)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"gated_mlp": False, "activation": "gelu", "mlp_bias": True, "norm": "layernorm"},
        {"gated_mlp": False, "activation": "relu"},
        {"dtype": "bfloat16"},
    ],
    ids=str,
)
def test_dense_ffn_is_the_same(fields: dict[str, Any]) -> None:
    model = small_model(**fields)
    check_numbers(lambda recompute: DenseFFN(model, recompute=recompute, device=CPU, training=True), model)


@pytest.mark.parametrize("backend", ["loop", "grouped_mm", "bmm"])
@pytest.mark.parametrize(
    ("moe", "fields"),
    [
        ({}, {}),
        ({"shared_expert_ffn_hidden_size": 40, "shared_expert_gate": True}, {"mlp_bias": True}),
        ({"norm_topk_prob": True}, {"gated_mlp": False, "activation": "gelu", "dtype": "bfloat16"}),
        ({}, {"gated_mlp": False, "activation": "relu"}),
        ({"capacity_factor": 0.7}, {"dtype": "bfloat16"}),
    ],
    ids=str,
)
def test_moe_ffn_is_the_same(backend: str, moe: dict[str, Any], fields: dict[str, Any]) -> None:
    model = small_model(moe=small_moe(**moe), **fields)
    check_numbers(lambda recompute: experts(model, backend, recompute), model)


@pytest.mark.parametrize("recompute", BY_OPERATION)
@pytest.mark.parametrize("tile", [None, 2])
def test_attention_itself_runs_again_in_tiles_only(recompute: BlockRecompute, tile: int | None) -> None:
    model = small_model()
    block = attention(model, "flash", recompute, bta_tile=tile)
    attend, seen = block.attend, []

    def spy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append(q.shape[0])
        return attend(q, k, v)

    block.attend = spy
    outcome(block, block, hidden_states(model))
    assert seen == ([4] if tile is None else [2, 2, 2, 2])


@pytest.mark.parametrize(("recompute", "again"), [(BY_OPERATION[0], []), (BY_OPERATION[1], [64])])
def test_the_second_gemm_never_runs_again(
    recompute: BlockRecompute, again: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bexp.kernels.experts import loop

    model = small_model(moe=small_moe())
    widths = []
    multiply = loop._LoopGemm.forward

    def spy(ctx: Any, x: Tensor, w: Tensor, counts: tuple[int, ...]) -> Tensor:
        widths.append(w.shape[2])
        return multiply(ctx, x, w, counts)

    monkeypatch.setattr(loop._LoopGemm, "forward", staticmethod(spy))
    block = experts(model, "loop", recompute)
    outcome(block, block, hidden_states(model))
    assert widths == [64, 48, *again]


def test_a_compiled_block_refuses_it() -> None:
    for recompute in BY_OPERATION:
        with pytest.raises(AssertionError, match="refuses"):
            attention(small_model(), "flash", recompute).compile_core()


@pytest.mark.parametrize("recompute", [*ON_DEVICE, Recompute("layers_1")])
@pytest.mark.parametrize("tile", [None, 2])
def test_the_whole_model_is_built_of_the_components_that_are_measured(recompute: Recompute, tile: int | None) -> None:
    model = small_model(moe=small_moe(first_k_dense=1))
    candidate = Candidate(
        micro_batch_size=4,
        bta_tile=tile,
        recompute=recompute,
        attention_backend="flash",
        expert_backend="loop",
        num_query_groups=model.query_groups,
    )
    kinds = {LayerKind.DENSE: ComponentKind.DENSE_FFN, LayerKind.MOE: ComponentKind.MOE_FFN}
    measured: dict[tuple[ComponentKind, bool], tuple[Component, Component]] = {
        (group.blocks[1].kind, group.layers.recomputed): (group.blocks[0], group.blocks[1])
        for group in Decomposer(model, training=True)(candidate).layers
    }
    decoder = DecoderModel(model, candidate, ExplorationRequest(model=model), CPU)
    for layer, kind in zip(decoder.layers, model.layer_kinds, strict=True):
        assert isinstance(layer, DecoderLayer)
        for block, component in zip((layer.attention, layer.ffn), measured[kinds[kind], layer.recompute], strict=True):
            assert block.bta_tile == component.bta_tile
            if layer.recompute:  # the layer does what its blocks are measured doing
                assert (block.recompute, component.recompute) == (BlockRecompute.NONE, BlockRecompute.FULL)
            else:
                assert block.recompute is component.recompute
