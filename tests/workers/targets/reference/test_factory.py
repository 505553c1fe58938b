from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bexp.explorer.cost.components import BlockRecompute, Component, ComponentKind
from bexp.explorer.cost.parameters import count_attention, count_dense_ffn, count_embedding, count_head, count_moe_ffn
from bexp.explorer.model.model import LayerKind
from bexp.explorer.model.routes import draw_routes
from bexp.explorer.model.routing import RoutingSpec
from bexp.explorer.request.request import ExplorationRequest
from bexp.workers.targets.reference.factory import build_block, example_inputs
from bexp.workers.targets.reference.ffn_block import MoEFFN
from bexp.workers.targets.reference.weights import device_routes
from tests.workers.targets.reference.models import CPU, small_model, small_moe

MODEL = small_model(moe=small_moe(first_k_dense=1), num_query_groups=2, dtype="bfloat16")


def components(recompute: BlockRecompute, tile: int | None) -> list[Component]:
    whole = BlockRecompute.FULL if recompute is BlockRecompute.FULL else BlockRecompute.NONE
    fields: list[dict[str, Any]] = [
        {"kind": ComponentKind.EMBEDDING},
        {"kind": ComponentKind.ATTENTION, "backend": "flash", "recompute": recompute, "bta_tile": tile},
        {"kind": ComponentKind.DENSE_FFN, "recompute": whole},
        {"kind": ComponentKind.MOE_FFN, "recompute": whole, "backend": "bmm"},
        {"kind": ComponentKind.HEAD},
    ]
    return [Component(micro_batch_size=2, **field) for field in fields]


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("recompute", list(BlockRecompute))
@pytest.mark.parametrize("tile", [None, 1])
def test_every_component_runs(mode: str, recompute: BlockRecompute, tile: int | None) -> None:
    request = ExplorationRequest.model_validate({"model": MODEL, "mode": mode})
    counts = {
        ComponentKind.EMBEDDING: count_embedding(MODEL),
        ComponentKind.ATTENTION: count_attention(MODEL),
        ComponentKind.DENSE_FFN: count_dense_ffn(MODEL),
        ComponentKind.MOE_FFN: count_moe_ffn(MODEL),
        ComponentKind.HEAD: count_head(MODEL),
    }
    for component in components(recompute, tile):
        generator = torch.Generator().manual_seed(0)
        block = build_block(MODEL, component, request, CPU, generator=generator)
        assert sum(p.numel() for p in block.parameters()) == counts[component.kind]
        inputs = example_inputs(MODEL, component, CPU, generator, training=mode == "train")
        out = block(*inputs)
        assert out.requires_grad == (mode == "train")
        if mode == "train":
            out.sum().backward()
            assert all(p.grad is not None and p.grad.any() for p in block.parameters())
            assert all(x.grad is not None for x in inputs if x.is_floating_point())


def test_inputs_are_random_and_repeatable() -> None:
    attention = Component(kind=ComponentKind.ATTENTION, micro_batch_size=3, backend="flash")
    (x,) = example_inputs(MODEL, attention, CPU, torch.Generator().manual_seed(1))
    (again,) = example_inputs(MODEL, attention, CPU, torch.Generator().manual_seed(1))
    assert x.shape == (3, 12, 48)
    assert x.dtype is torch.bfloat16
    assert float(x.float().std()) == pytest.approx(1.0, abs=0.1)
    assert torch.equal(x, again)
    assert not x.requires_grad
    head = Component(kind=ComponentKind.HEAD, micro_batch_size=3)
    hidden, targets = example_inputs(MODEL, head, CPU, training=True)
    assert hidden.requires_grad
    assert targets.shape == (3, 12)
    assert int(targets.max()) < MODEL.vocab_size
    embedding = Component(kind=ComponentKind.EMBEDDING, micro_batch_size=3)
    (tokens,) = example_inputs(MODEL, embedding, CPU)
    assert tokens.dtype is torch.int64
    assert tokens.unique().numel() > 1


def test_expert_blocks_are_routed_as_the_request_says() -> None:
    request = ExplorationRequest.model_validate({"model": MODEL, "routing": {"kind": "zipf"}, "seed": 5})
    component = Component(kind=ComponentKind.MOE_FFN, micro_batch_size=2, backend="loop")
    block = build_block(MODEL, component, request, CPU)
    assert isinstance(block, MoEFFN)
    assert block.routes is not None
    assert MODEL.moe is not None
    wanted = draw_routes(MODEL.moe, request.routing, 24, np.random.default_rng(5))
    assert np.array_equal(block.routes.numpy(), wanted)


def test_many_tokens_repeat_the_drawn_routes() -> None:
    routes = device_routes(MODEL, RoutingSpec(), 150_000, 0, CPU)
    assert routes.shape == (150_000, 2)
    assert torch.equal(routes[:65_536], routes[65_536:131_072])
    assert not torch.equal(routes[:30_000], routes[30_000:60_000])
    assert torch.equal(routes[131_072:], routes[:18_928])


def test_fewer_tokens_have_the_first_routes_of_more() -> None:
    assert torch.equal(
        device_routes(MODEL, RoutingSpec(), 100, 0, CPU), device_routes(MODEL, RoutingSpec(), 5000, 0, CPU)[:100]
    )


def test_weights_are_drawn_in_the_models_dtype() -> None:
    component = Component(
        kind=ComponentKind.ATTENTION, micro_batch_size=1, backend="flash", recompute=BlockRecompute.NONE
    )
    block = build_block(MODEL, component, ExplorationRequest(model=MODEL), CPU)
    matrix = block.get_parameter("w_qkv")
    assert matrix.dtype is torch.bfloat16
    assert float(matrix.detach().float().std()) == pytest.approx(0.02, rel=0.05)
    assert MODEL.count_layers(LayerKind.MOE) == 2
