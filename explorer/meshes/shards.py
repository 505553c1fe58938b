"""The part that one device has of a block that several devices share, as a block that can be built and timed by itself.

A tensor-parallel device has a part of the heads, of the FFN's hidden width and of the vocabulary (Shoeybi et al., 2019,
arXiv:1909.08053). The block's input and output are as wide as without parallelism.

An expert-parallel device has a part of the experts. It has the rows that routing sends to the busiest such device, each
for one of its experts. Fewer rows travel: a token goes once to each device that has any of its experts, as
`bexp.kernels.expert_parallel` sends it. The device that is timed has its own tokens and routes them as in training.
Formulas take its experts for an `expert_chunk`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from bexp.explorer.cost.activation_memory import predict_component_bytes
from bexp.explorer.cost.components import Component, ComponentBytes
from bexp.explorer.cost.roofline import PredictedSeconds, predict_component_seconds
from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.model.model import ModelSpec, MoESpec
from bexp.explorer.model.routes import draw_batch_routes, draw_routes
from bexp.explorer.model.routing import RoutingSpec
from bexp.explorer.request.request import ExplorationRequest

SHARED_EXPERTS = "shared_experts"
"""The part that a dense FFN stands for if it is that of a layer's shared experts."""
SPREAD_EXPERTS = "spread_experts"
"""The part that an expert FFN stands for if several devices share its experts."""
NO_SHARED_EXPERTS: dict[str, object] = {"shared_expert_ffn_hidden_size": 0, "shared_expert_gate": False}
DRAWN_TOKENS = 1 << 14
"""Tokens that are drawn to find the busiest device; its share is then known to about a percent."""


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """The busiest of several devices with experts."""

    share: float
    """Of all pairs of token and expert, those that all devices together send to it."""
    home_share: float
    """Of its own pairs, those that each device keeps for copies of shadowed experts."""
    routing: RoutingSpec
    """How its pairs fall on its experts, and then on the copies."""
    visited: float
    """Devices that a token goes to on average."""
    visiting: float
    """The largest share of the tokens that go to any one device."""


def is_shard(component: Component) -> bool:
    """Return whether a component is the part that one of several devices has of a block."""
    return component.tensor_parallel_size > 1 or component.part in {SHARED_EXPERTS, SPREAD_EXPERTS}


def shard_of(
    component: Component, model: ModelSpec, request: ExplorationRequest
) -> tuple[ModelSpec, ExplorationRequest]:
    """Return the model whose block a component is, and the request that goes with it.

    Experts that devices share are those of the whole model, for the tokens that sequence parallelism leaves a device.
    """
    tensor = component.tensor_parallel_size
    if component.part == SHARED_EXPERTS:
        return shared_expert_model(tensor_shard(model, tensor)), request
    if component.part != SPREAD_EXPERTS:
        return tensor_shard(model, tensor), request
    assert model.moe is not None, "a model with experts"
    experts = model.moe.model_copy(update=NO_SHARED_EXPERTS)
    whole = model.model_copy(update={"moe": experts, "seq_length": -(-model.seq_length // tensor)})
    return whole, request.model_copy(update={"model": whole})


def expert_chunk(
    component: Component, model: ModelSpec, request: ExplorationRequest
) -> tuple[ModelSpec, ExplorationRequest]:
    """Return a model whose expert FFN has one chunk of the busiest device's rows, and the request of their routing."""
    assert component.part == SPREAD_EXPERTS and model.moe is not None, "experts that devices share"
    expert, shadowed = component.expert_parallel_size, component.shadowed_experts
    busiest = _busiest(component, model, request)
    rows = -(-expert_rows(component, model, request).computed // component.overlap_degree)
    experts = model.moe.model_copy(
        update={
            "num_experts": model.moe.num_experts // expert + shadowed,
            "top_k": 1,
            "capacity_factor": None,  # the rows are those that are left
            **NO_SHARED_EXPERTS,
        }
    )
    shard = model.model_copy(update={"moe": experts, "seq_length": -(-rows // component.micro_batch_size)})
    return shard, request.model_copy(update={"model": shard, "routing": busiest.routing})


def tensor_shard(model: ModelSpec, size: int) -> ModelSpec:
    """Return the part of each block on one of `size` tensor-parallel devices; the vocabulary is padded to divide."""
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


def spread_expert_model(model: ModelSpec, size: int) -> ModelSpec:
    """Return a model whose experts are whole, and whose shared experts are those of one of `size` devices."""
    assert model.moe is not None, "a model with experts"
    shared = model.moe.shared_expert_ffn_hidden_size // size
    return model.model_copy(update={"moe": model.moe.model_copy(update={"shared_expert_ffn_hidden_size": shared})})


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Rows of a micro-batch, in pairs of token and expert, and as tokens that travel.

    A token travels once to each device that has any of its experts, other than shadowed ones, and once back.
    """

    received: int
    """Pairs that the busiest device receives."""
    home: int
    """Pairs of its own that each device keeps for shadowed experts."""
    moved_out: int
    """Tokens that a device sends."""
    moved_in: int
    """Tokens that the device receives which most of them go to."""

    @property
    def computed(self) -> int:
        """Pairs that the busiest device computes."""
        return max(1, self.received + self.home)


def expert_rows(component: Component, model: ModelSpec, request: ExplorationRequest) -> ExpertRows:
    """Return the rows of an expert-parallel group, for a micro-batch.

    The group of `expert_parallel_size` devices routes the tokens of as many devices together. Sequence parallelism
    leaves each of them 1 / `tensor_parallel_size` of a micro-batch.
    """
    assert model.moe is not None, "a model with experts"
    size, busiest = component.expert_parallel_size, _busiest(component, model, request)
    tokens = _own_tokens(component, model)
    pairs = tokens * model.moe.top_k
    return ExpertRows(
        received=math.ceil(pairs * size * busiest.share),
        home=math.ceil(pairs * busiest.home_share),
        moved_out=math.ceil(tokens * busiest.visited),
        moved_in=math.ceil(tokens * size * busiest.visiting),
    )


def _own_tokens(component: Component, model: ModelSpec) -> float:
    """Return the tokens that a device routes."""
    return component.micro_batch_size * model.seq_length / component.tensor_parallel_size


def _busiest(component: Component, model: ModelSpec, request: ExplorationRequest) -> ExpertShare:
    assert model.moe is not None, "a model with experts"
    size, shadowed = component.expert_parallel_size, component.shadowed_experts
    if model.moe.capacity_factor is None:
        return busiest_device(model.moe, request.routing, size, request.seed, shadowed)
    tokens = math.ceil(_own_tokens(component, model))  # fewer tokens are spread less evenly, so that more are dropped
    return busiest_device(model.moe, request.routing, size, request.seed, shadowed, tokens)


@lru_cache(maxsize=512)
def busiest_device(
    moe: MoESpec, routing: RoutingSpec, size: int, seed: int, shadowed: int = 0, num_tokens: int = DRAWN_TOKENS
) -> ExpertShare:
    """Return which share of the pairs the busiest of `size` devices gets; each has consecutive experts.

    The `shadowed` most popular experts are on every device, and none of their pairs is sent. Each device has
    `num_tokens` of its own, and drops the pairs that are over an expert's capacity. Shares are of all pairs.
    """
    routes_TK = _drawn(moe, routing, seed, num_tokens)
    total = routes_TK.size
    popular = np.argsort(-np.bincount(routes_TK.ravel(), minlength=moe.num_experts), kind="stable")[:shadowed]
    kept_TK = _within_capacity(routes_TK, moe)
    counts_E = np.bincount(routes_TK[kept_TK], minlength=moe.num_experts)
    device_E = np.arange(moe.num_experts) // (moe.num_experts // size)
    device_E[popular] = size
    visits_TD = np.zeros((routes_TK.shape[0], size + 2), dtype=bool)
    np.put_along_axis(visits_TD, np.where(kept_TK, device_E[routes_TK], size + 1), True, axis=1)
    visiting_D = visits_TD[:, :size].mean(axis=0)
    home = counts_E[popular]
    counts_E[popular] = 0
    counts_DE = counts_E.reshape(size, -1)
    busiest = counts_DE[int(counts_DE.sum(axis=1).argmax())]
    # The busiest device gets the pairs of all devices for its own experts, and those of one device for the copies.
    shares = tuple(float(count) for count in np.concatenate((busiest, home / size)))
    return ExpertShare(
        share=float(busiest.sum() / total),
        home_share=float(home.sum() / total),
        routing=RoutingSpec(kind="shares", shares=shares),
        visited=float(visiting_D.sum()),
        visiting=float(visiting_D.max()),
    )


def _within_capacity(routes_TK: npt.NDArray[np.int64], moe: MoESpec) -> npt.NDArray[np.bool_]:
    """Return which pairs are kept: the first of each expert, because weights do not depend on a token's place."""
    kept = np.ones(routes_TK.size, dtype=bool)
    if moe.capacity_factor is not None:
        order = np.argsort(routes_TK.ravel(), kind="stable")
        experts = routes_TK.ravel()[order]
        starts = np.searchsorted(experts, np.arange(moe.num_experts))
        kept[order] = np.arange(experts.size) - starts[experts] < moe.capacity(routes_TK.shape[0])
    return kept.reshape(routes_TK.shape)


@lru_cache(maxsize=8)
def _drawn(moe: MoESpec, routing: RoutingSpec, seed: int, num_tokens: int) -> npt.NDArray[np.int64]:
    if moe.capacity_factor is None:
        return draw_routes(moe, routing, num_tokens, np.random.default_rng(seed))
    return draw_batch_routes(moe.model_copy(update={"capacity_factor": None}), routing, num_tokens, seed)


def predict_shard_seconds(
    component: Component, model: ModelSpec, request: ExplorationRequest, hardware: HardwareSpec
) -> PredictedSeconds:
    """Return the seconds of a component; shared experts run as often as there are chunks."""
    if component.part != SPREAD_EXPERTS:
        return predict_component_seconds(component, *shard_of(component, model, request), hardware)
    chunk = predict_component_seconds(component, *expert_chunk(component, model, request), hardware)
    number = component.overlap_degree
    return PredictedSeconds(number * chunk.device, number * chunk.host, number * chunk.num_operations)


def predict_shard_bytes(component: Component, model: ModelSpec, request: ExplorationRequest) -> ComponentBytes:
    """Return the bytes of a component.

    Shared experts keep those of all chunks, and copies of shadowed experts with their gradients in backward. Buffers
    are what a device sends and gets back, and what the other devices send to it.
    """
    if component.part != SPREAD_EXPERTS:
        return predict_component_bytes(component, *shard_of(component, model, request))
    assert model.moe is not None, "a model with experts"
    chunk = predict_component_bytes(component, *expert_chunk(component, model, request))
    rows, item = expert_rows(component, model, request), model.dtype.itemsize
    width = (3 if model.gated_mlp else 2) * model.moe.expert_ffn_hidden_size
    copied = component.shadowed_experts * width * model.hidden_size * item
    moved = (2 * rows.moved_out + rows.moved_in) * model.hidden_size * item
    others = (component.overlap_degree - 1) * chunk.saved + copied
    return ComponentBytes(
        saved=chunk.saved + others,
        forward_peak=chunk.forward_peak + others + moved,
        backward_peak=chunk.backward_peak + others + moved + copied,
    )
