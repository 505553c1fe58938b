"""What one device has of a block that several devices share, as a block that can be built and timed by itself.

A tensor-parallel device has a part of the heads, of the FFN's hidden width and of the vocabulary (Shoeybi et al., 2019,
arXiv:1909.08053); what comes in and goes out is as wide as ever. An expert-parallel device has a part of the experts,
and the rows that routing sends to the busiest such device, each for one of its experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from explorer.cost_model.components import Component, ComponentKind
from explorer.spec.model import ModelSpec, MoESpec
from explorer.spec.request import ExplorationRequest
from explorer.spec.routes import draw_routes
from explorer.spec.routing import RoutingSpec

SHARED_EXPERTS = "shared_experts"
"""The part that a dense FFN stands for if it is that of a layer's shared experts."""
DRAWN_TOKENS = 1 << 14
"""Tokens that are drawn to find the busiest device; its share is then known to about a percent."""


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """The busiest of several devices with experts.

    All devices together send it `share` of their pairs of token and expert. Each keeps `home_share` of its own pairs
    for copies of shadowed experts. `routing` says how the busiest one's pairs fall on its experts, and then on those
    copies.
    """

    share: float
    home_share: float
    routing: RoutingSpec


def shard_of(
    component: Component, model: ModelSpec, request: ExplorationRequest
) -> tuple[ModelSpec, ExplorationRequest]:
    """Return the model whose block a component is, and the request that says how its tokens fall on experts."""
    tensor, expert = component.tensor_parallel_size, component.expert_parallel_size
    if component.part == SHARED_EXPERTS:
        return shared_expert_model(tensor_shard(model, tensor)), request
    if tensor == 1 and expert == 1:
        return model, request
    if expert == 1:
        return tensor_shard(model, tensor), request
    assert component.kind is ComponentKind.MOE_FFN and model.moe is not None, "experts are shared in their block alone"
    shadowed = component.shadowed_experts
    busiest = busiest_device(model.moe, request.routing, expert, request.seed, shadowed)
    rows = -(-expert_rows(component, model, request).computed // component.overlap_degree)
    experts = model.moe.model_copy(
        update={
            "num_experts": model.moe.num_experts // expert + shadowed,
            "top_k": 1,
            "shared_expert_ffn_hidden_size": 0,
            "shared_expert_gate": False,
        }
    )
    shard = model.model_copy(update={"moe": experts, "seq_length": -(-rows // component.micro_batch_size)})
    return shard, request.model_copy(update={"model": shard, "routing": busiest.routing})


def tensor_shard(model: ModelSpec, size: int) -> ModelSpec:
    """Return what one of `size` tensor-parallel devices has of each block; the vocabulary is padded to divide."""
    if size == 1:
        return model
    moe = model.moe
    if moe is not None:
        widths = ("expert_ffn_hidden_size", "shared_expert_ffn_hidden_size")
        moe = moe.model_copy(update={name: getattr(moe, name) // size for name in widths})
    return model.model_copy(
        update={
            "num_attention_heads": model.num_attention_heads // size,
            "num_query_groups": model.query_groups // size,
            "head_dim": model.head_size,
            "ffn_hidden_size": model.ffn_hidden_size // size,
            "vocab_size": -(-model.vocab_size // size),
            "moe": moe,
        }
    )


def shared_expert_model(model: ModelSpec) -> ModelSpec:
    """Return a model whose dense FFN is the shared experts of `model`, which expert parallelism does not move."""
    assert model.moe is not None, "a model with experts"
    return model.model_copy(update={"ffn_hidden_size": model.moe.shared_expert_ffn_hidden_size})


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Pairs of token and expert of a micro-batch: those that the busiest device receives, and those of each device.

    A device keeps `home` of its own for shadowed experts and sends the other `sent` to the devices of their experts.
    """

    received: int
    sent: int
    home: int

    @property
    def computed(self) -> int:
        """Rows that the busiest device computes."""
        return max(1, self.received + self.home)


def expert_rows(component: Component, model: ModelSpec, request: ExplorationRequest) -> ExpertRows:
    """Return the pairs of token and expert of an expert-parallel group, for a micro-batch.

    The group of `expert_parallel_size` devices routes the tokens of as many devices together, each of which has the
    1 / `tensor_parallel_size` of a micro-batch that sequence parallelism leaves it.
    """
    assert model.moe is not None, "a model with experts"
    size, shadowed = component.expert_parallel_size, component.shadowed_experts
    busiest = busiest_device(model.moe, request.routing, size, request.seed, shadowed)
    pairs = component.micro_batch_size * model.seq_length / component.tensor_parallel_size * model.moe.top_k
    home = math.ceil(pairs * busiest.home_share)
    return ExpertRows(math.ceil(pairs * size * busiest.share), math.ceil(pairs) - home, home)


@lru_cache(maxsize=512)
def busiest_device(moe: MoESpec, routing: RoutingSpec, size: int, seed: int, shadowed: int = 0) -> ExpertShare:
    """Return which share of the pairs the busiest of `size` devices gets; each has consecutive experts.

    The `shadowed` most popular experts are on every device, and none of their pairs is sent.
    """
    counts_E = np.bincount(_drawn(moe, routing, seed), minlength=moe.num_experts)
    total = int(counts_E.sum())
    popular = np.argsort(-counts_E, kind="stable")[:shadowed]
    home = counts_E[popular]
    counts_E[popular] = 0
    counts_DE = counts_E.reshape(size, -1)
    busiest = counts_DE[int(counts_DE.sum(axis=1).argmax())]
    # The busiest device gets the pairs of all devices for its own experts, and those of one device for the copies.
    shares = tuple(float(count) for count in np.concatenate((busiest, home / size)))
    routing = RoutingSpec(kind="shares", shares=shares)
    return ExpertShare(float(busiest.sum() / total), float(home.sum() / total), routing)


@lru_cache(maxsize=8)
def _drawn(moe: MoESpec, routing: RoutingSpec, seed: int) -> np.ndarray:
    return draw_routes(moe, routing, DRAWN_TOKENS, np.random.default_rng(seed)).ravel()
