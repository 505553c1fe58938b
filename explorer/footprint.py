"""Predicted bytes of components, before anything is measured.

The counts follow Korthikanti et al. (2022, arXiv:2205.05198), written out for the blocks that the profiler builds:
gated FFNs, RMSNorm, flash attention, no dropout. They decide what is worth measuring; the measured bytes replace them.
"""

from __future__ import annotations

from dataclasses import dataclass

from explorer.components import BlockRecompute, Component, ComponentKind
from explorer.models import ModelSpec
from explorer.parameters import count_attention, count_dense_ffn, count_embedding, count_head, count_moe_ffn
from explorer.requests import ExplorationRequest

FLOAT32_BYTES = 4
INDEX_BYTES = 8
OPTIMIZER_BUCKET_BYTES = 256 << 20  # the optimizer converts at most this much at a time


@dataclass(frozen=True, slots=True)
class ComponentBytes:
    """Bytes over the level before the component's forward, as `ComponentMeasurement` defines them."""

    saved: int
    forward_peak: int
    backward_peak: int


def predict_component_bytes(component: Component, model: ModelSpec, request: ExplorationRequest) -> ComponentBytes:
    """Activation bytes of one component. Parameters, gradients and optimizer states are not in it."""
    if component.kind is ComponentKind.OPTIMIZER:
        return ComponentBytes(0, 0, _optimizer_transient(model, request))
    if request.mode == "eval":
        return _inference(component, model, request)
    predict = {
        ComponentKind.EMBEDDING: _embedding,
        ComponentKind.ATTENTION: _attention,
        ComponentKind.DENSE_FFN: _dense_ffn,
        ComponentKind.MOE_FFN: _moe_ffn,
        ComponentKind.HEAD: _head,
    }[component.kind]
    return predict(component, model, request)


def _inference(component: Component, model: ModelSpec, request: ExplorationRequest) -> ComponentBytes:
    """Without a backward pass nothing is saved: the peak is the largest pair of neighbours within the block."""
    item = model.dtype.itemsize
    tokens = component.micro_batch_size * model.seq_length
    hidden = tokens * model.hidden_size * item
    if component.kind is ComponentKind.HEAD:
        chunk = tokens if request.training.loss.kind == "full" else min(tokens, request.training.loss.chunk_tokens)
        return ComponentBytes(0, hidden + chunk * model.vocab_size * (item + FLOAT32_BYTES), 0)
    if component.kind is ComponentKind.EMBEDDING:
        return ComponentBytes(hidden, hidden, 0)
    if component.kind is ComponentKind.ATTENTION:
        batch = component.bta_tile or component.micro_batch_size
        rows = batch * model.seq_length
        query = rows * model.num_attention_heads * model.head_size * item
        key = rows * (component.num_query_groups or model.query_groups) * model.head_size * item
        scores = 0
        if component.backend == "math":
            scores = 2 * batch * model.num_attention_heads * model.seq_length**2 * FLOAT32_BYTES
        inside = rows * model.hidden_size * item + query + 2 * key + max(query + key, query + scores)
        return ComponentBytes(hidden, inside + (hidden if component.bta_tile else 0), 0)
    if component.kind is ComponentKind.DENSE_FFN:
        wide = tokens * model.ffn_hidden_size * item
        return ComponentBytes(hidden, hidden + (3 if model.gated_mlp else 2) * wide, 0)
    assert model.moe is not None
    rows, router = _expert_rows(component, model, request), _router_bytes(component, model)
    wide = (3 if model.gated_mlp else 2) * model.moe.expert_ffn_hidden_size
    return ComponentBytes(hidden, hidden + router + rows * (model.hidden_size + wide) * item, 0)


def _embedding(component: Component, model: ModelSpec, _: ExplorationRequest) -> ComponentBytes:
    output = component.micro_batch_size * model.seq_length * model.hidden_size * model.dtype.itemsize
    return ComponentBytes(output, output * (2 if model.position == "learned" else 1), output)


def _attention(component: Component, model: ModelSpec, request: ExplorationRequest) -> ComponentBytes:
    tokens = component.micro_batch_size * model.seq_length
    output = tokens * model.hidden_size * model.dtype.itemsize
    if component.bta_tile is None:
        return _attention_block(component, component.micro_batch_size, model)
    tile = _attention_block(component, component.bta_tile, model)
    # Every tile leaves its output; the concatenation holds all of them twice for a moment.
    return ComponentBytes(output, output + max(output, tile.forward_peak), output + tile.backward_peak)


def _attention_block(component: Component, batch: int, model: ModelSpec) -> ComponentBytes:
    item = model.dtype.itemsize
    tokens = batch * model.seq_length
    query = tokens * model.num_attention_heads * model.head_size * item
    key = tokens * (component.num_query_groups or model.query_groups) * model.head_size * item
    hidden = tokens * model.hidden_size * item
    rotated = query + key if model.position == "rope" else 0
    normed = query + key if model.qk_norm != "none" else 0
    projections = query + 2 * key
    lse = batch * model.num_attention_heads * model.seq_length * FLOAT32_BYTES
    scores = batch * model.num_attention_heads * model.seq_length**2
    core = 2 * scores * (FLOAT32_BYTES + item) // 2 if component.backend == "math" else lse
    core_saved = 0 if component.recompute is BlockRecompute.SELECTIVE else core
    saved = hidden + projections + rotated + normed + query + hidden + core_saved
    forward_transient = projections // 2 + (core if component.backend == "math" else 0)
    backward_transient = 2 * projections + hidden + (2 * core if component.backend == "math" else 0)
    recomputed = core - core_saved
    return ComponentBytes(saved, saved + forward_transient, saved + backward_transient + recomputed)


def _dense_ffn(component: Component, model: ModelSpec, _: ExplorationRequest) -> ComponentBytes:
    tokens = component.micro_batch_size * model.seq_length
    return _mlp_bytes(tokens, model.hidden_size, model.ffn_hidden_size, model)


def _mlp_bytes(tokens: int, hidden_size: int, ffn_hidden_size: int, model: ModelSpec) -> ComponentBytes:
    item = model.dtype.itemsize
    hidden = tokens * hidden_size * item
    wide = tokens * ffn_hidden_size * item
    saved = 2 * hidden + (4 if model.gated_mlp else 2) * wide
    return ComponentBytes(saved, saved + wide, saved + 3 * wide + hidden)


def _moe_ffn(component: Component, model: ModelSpec, request: ExplorationRequest) -> ComponentBytes:
    moe = model.moe
    assert moe is not None
    item = model.dtype.itemsize
    tokens = component.micro_batch_size * model.seq_length
    pairs = tokens * moe.top_k
    rows = _expert_rows(component, model, request)
    hidden = tokens * model.hidden_size * item
    wide = (3 if model.gated_mlp else 2) * rows * moe.expert_ffn_hidden_size * item
    routed = 2 * rows * model.hidden_size * item + wide
    if component.backend == "bmm":
        routed += pairs * model.hidden_size * item
    saved = 2 * hidden + routed + _router_bytes(component, model)
    transient = rows * (2 * model.hidden_size + 2 * moe.expert_ffn_hidden_size) * item
    if moe.shared_expert_ffn_hidden_size:
        shared = _mlp_bytes(tokens, model.hidden_size, moe.shared_expert_ffn_hidden_size, model)
        saved += shared.saved
    return ComponentBytes(saved, saved + transient // 2, saved + transient)


def _expert_rows(component: Component, model: ModelSpec, request: ExplorationRequest) -> int:
    """Rows that the experts' GEMMs see: the token-expert pairs, and with `bmm` the padding to the largest expert."""
    assert model.moe is not None
    pairs = component.micro_batch_size * model.seq_length * model.moe.top_k
    if component.backend != "bmm":
        return pairs
    return int(pairs * max(1.0, largest_share(request) * model.moe.num_experts))


def _router_bytes(component: Component, model: ModelSpec) -> int:
    """Logits, probabilities, scores, and the indices that sort the pairs."""
    assert model.moe is not None
    tokens = component.micro_batch_size * model.seq_length
    scores = tokens * model.moe.num_experts * (model.dtype.itemsize + 2 * FLOAT32_BYTES)
    return scores + 4 * tokens * model.moe.top_k * INDEX_BYTES


def largest_share(request: ExplorationRequest) -> float:
    """Largest expected share of the token-expert pairs that one expert receives."""
    moe = request.model.moe
    assert moe is not None
    if request.routing.shares is not None:
        return max(request.routing.shares) / sum(request.routing.shares)
    if request.routing.kind == "zipf":
        total = sum(rank**-request.routing.zipf_exponent for rank in range(1, moe.num_experts + 1))
        return float(min(1 / moe.top_k, 1 / total))
    return 1 / moe.num_experts


def _head(component: Component, model: ModelSpec, request: ExplorationRequest) -> ComponentBytes:
    item = model.dtype.itemsize
    tokens = component.micro_batch_size * model.seq_length
    hidden = tokens * model.hidden_size * item
    loss = request.training.loss
    if loss.kind == "full":
        logits = tokens * model.vocab_size
        saved = hidden + logits * (item + FLOAT32_BYTES)
        return ComponentBytes(saved, saved + logits * FLOAT32_BYTES, saved + logits * (FLOAT32_BYTES + item))
    chunk = min(tokens, loss.chunk_tokens) * model.vocab_size * (2 * item + 2 * FLOAT32_BYTES)
    weight = model.vocab_size * model.hidden_size * item
    return ComponentBytes(2 * hidden + weight, 2 * hidden + weight + chunk, 3 * hidden + weight + chunk)


def _optimizer_transient(model: ModelSpec, request: ExplorationRequest) -> int:
    if not request.training.optimizer.has_master(model.dtype):
        return 0
    ffn = count_dense_ffn(model) if model.moe is None else count_moe_ffn(model)
    largest = max(count_embedding(model), count_head(model), count_attention(model), ffn)
    return min(OPTIMIZER_BUCKET_BYTES, FLOAT32_BYTES * largest // request.optimizer_shards)
