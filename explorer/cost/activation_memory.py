"""Predicted bytes of components, before anything is measured.

The counts follow Korthikanti et al. (2022, arXiv:2205.05198), for the blocks that the profiler builds: gated FFNs,
norms that keep one or two numbers a token, flash attention, no dropout. They decide which components are worth
measuring. Measured bytes replace them.
"""

from __future__ import annotations

from dataclasses import dataclass

from bexp.explorer.cost.components import BlockRecompute, Component, ComponentBytes, ComponentKind
from bexp.explorer.cost.parameters import count_attention, count_dense_ffn, count_embedding, count_head, count_moe_ffn
from bexp.explorer.cost.part_costs import predict_part_bytes
from bexp.explorer.model.model import ModelSpec
from bexp.explorer.model.parts import ExploredModel, ModelParts
from bexp.explorer.request.request import ExplorationRequest

FLOAT32_BYTES = 4
INDEX_BYTES = 8
FUSED = "fused"
"""The back end that gathers and activates within its products, and so keeps neither result."""
OPTIMIZER_BUCKET_BYTES = 256 << 20
"""The optimizer converts at most this many bytes at a time."""


def predict_component_bytes(component: Component, model: ExploredModel, request: ExplorationRequest) -> ComponentBytes:
    """Return the activation bytes of one component, without parameters, gradients and optimizer states."""
    if isinstance(model, ModelParts):
        return predict_part_bytes(component, model, request)
    if component.kind is ComponentKind.OPTIMIZER:
        return ComponentBytes(0, 0, _optimizer_transient(model, request.sharded(component.sharding)))
    if component.kind is ComponentKind.COMMUNICATION:  # `cost.step.gathered_bytes` has what it holds
        return ComponentBytes(0, 0, 0)
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


def local_length(component: Component, model: ModelSpec) -> int:
    """Return the number of tokens of each sequence on a device."""
    return model.seq_length // component.context_parallel_size


def local_tokens(component: Component, model: ModelSpec) -> int:
    """Return the number of tokens of a micro-batch on a device."""
    return component.micro_batch_size * local_length(component, model)


def _inference(component: Component, model: ModelSpec, request: ExplorationRequest) -> ComponentBytes:
    """Return the bytes without a backward pass: nothing is saved, and the peak is the largest pair of neighbours."""
    item = model.dtype.itemsize
    tokens = local_tokens(component, model)
    hidden = tokens * model.hidden_size * item
    if component.kind is ComponentKind.HEAD:
        chunk = tokens if request.training.loss.kind == "full" else min(tokens, request.training.loss.chunk_tokens)
        return ComponentBytes(0, hidden + chunk * model.vocab_size * (item + FLOAT32_BYTES), 0)
    if component.kind is ComponentKind.EMBEDDING:
        return ComponentBytes(hidden, hidden, 0)
    if component.kind is ComponentKind.ATTENTION:
        batch = component.bta_tile or component.micro_batch_size
        length = local_length(component, model)
        rows = batch * length
        query = rows * model.num_attention_heads * model.head_size * item
        key = rows * (component.num_query_groups or model.query_groups) * model.head_size * item
        scores = 0
        if component.attention == "math":
            scores = 2 * batch * model.num_attention_heads * length**2 * FLOAT32_BYTES
        inside = rows * model.hidden_size * item + query + 2 * key + max(query + key, query + scores)
        if component.communicates:
            inside += _ring_bytes(query, key, item, scores)[0]
        return ComponentBytes(hidden, inside + (hidden if component.bta_tile else 0), 0)
    if component.kind is ComponentKind.DENSE_FFN:
        wide = tokens * model.ffn_hidden_size * item
        return ComponentBytes(hidden, hidden + (3 if model.gated_mlp else 2) * wide, 0)
    assert model.moe is not None
    rows, router = _expert_rows(component, model, request), _router_bytes(component, model)
    wide = (3 if model.gated_mlp else 2) * model.moe.expert_ffn_hidden_size
    return ComponentBytes(hidden, hidden + router + rows * (model.hidden_size + wide) * item, 0)


def _embedding(component: Component, model: ModelSpec, _: ExplorationRequest) -> ComponentBytes:
    output = local_tokens(component, model) * model.hidden_size * model.dtype.itemsize
    return ComponentBytes(output, output * (2 if model.position == "learned" else 1), output)


def _attention(component: Component, model: ModelSpec, request: ExplorationRequest) -> ComponentBytes:
    tokens = local_tokens(component, model)
    output = tokens * model.hidden_size * model.dtype.itemsize
    if component.bta_tile is None:
        return _attention_block(component, component.micro_batch_size, model)
    tile = _attention_block(component, component.bta_tile, model)
    # Every tile leaves its output, and the concatenation holds all of them twice for a moment.
    return ComponentBytes(output, output + max(output, tile.forward_peak), output + tile.backward_peak)


@dataclass(frozen=True, slots=True)
class _Kept:
    """Bytes that a block keeps for the backward pass, by the recomputation policy that frees them.

    `between` are the tensors between matrix products, attention and routing. `products` are the results of the first
    matrix product. `always` are kept under every policy by operation, such as the block's output.
    """

    between: int
    products: int
    always: int

    @property
    def live(self) -> int:
        """All of the bytes, as they exist at the end of forward, and again in backward."""
        return self.between + self.products + self.always

    def saved(self, recompute: BlockRecompute) -> int:
        """Return the bytes that a policy keeps between forward and backward."""
        if recompute is BlockRecompute.ACTIVATIONS:
            return self.products + self.always
        return self.always if recompute is BlockRecompute.PROJECTIONS else self.live


def _attention_block(component: Component, batch: int, model: ModelSpec) -> ComponentBytes:
    item = model.dtype.itemsize
    length = local_length(component, model)
    rows = batch * length
    heads = rows * model.num_attention_heads
    groups = component.num_query_groups or model.query_groups
    query = heads * model.head_size * item
    key = rows * groups * model.head_size * item
    hidden = rows * model.hidden_size * item
    projections = query + 2 * key  # rotated in place
    normed = query + key if model.qk_norm != "none" else 0
    scores = heads * length * FLOAT32_BYTES if component.attention == "math" else 0
    # Plain attention works on float32 copies of queries, keys and values, and keeps its scores. Fused attention works
    # on its inputs. So does ring attention, which computes the scores of each block again in backward.
    math = component.attention == "math" and not component.communicates
    core = scores + 3 * heads * model.head_size * FLOAT32_BYTES if math else heads * FLOAT32_BYTES
    between, products = hidden, projections
    if component.recompute is BlockRecompute.SELECTIVE:
        between, again, core = between + normed, core, 0
    else:
        again = 0
        between += normed if not math else 0
        products = projections if normed or not math else 0
        if component.attention == "efficient" and groups < model.num_attention_heads:
            between += 2 * query  # keys and values for every query head
    kept = _Kept(between, products, core + query + hidden)
    saved = kept.saved(component.recompute)
    around, back = _ring_bytes(query, key, item, scores) if component.communicates else (0, 0)
    forward = max(saved + hidden + scores + (scores if again else 0), kept.live) + around
    # The gradients of the projections, and the buffer in which a fused kernel accumulates those of the queries.
    gradients = projections + (scores + projections if scores else query)
    return ComponentBytes(saved, forward, kept.live + again + gradients + back)


def _ring_bytes(query: int, key: int, item: int, scores: int) -> tuple[int, int]:
    """Return the bytes of a ring in forward and in backward.

    They are keys and values twice, because one pair is in transfer, and the sums of its blocks' results in float32.
    Forward sums outputs. Backward sums the gradients of queries, keys and values; those of keys and values are also in
    transfer. `query` and `key` are the bytes of a device's queries and keys, and `item` those of one number in them.
    `scores` are the bytes of a block's scores, which plain attention also holds as probabilities.
    """
    wide = FLOAT32_BYTES / item
    passing = 4 * key + scores
    return passing + round(wide * query), passing + round(wide * (query + 4 * key))


def _dense_ffn(component: Component, model: ModelSpec, _: ExplorationRequest) -> ComponentBytes:
    tokens = local_tokens(component, model)
    hidden = tokens * model.hidden_size * model.dtype.itemsize
    wide = tokens * model.ffn_hidden_size * model.dtype.itemsize
    mlp = _mlp(wide, model)
    kept = _Kept(hidden + mlp.between, mlp.products, mlp.always + hidden)
    saved = kept.saved(component.recompute)
    transient = (3 if model.gated_mlp else 2) * wide
    return ComponentBytes(saved, max(saved + hidden, kept.live), kept.live - hidden + transient)


def _mlp(wide: int, model: ModelSpec) -> _Kept:
    """Return what an MLP keeps in addition to input and output; `wide` are the bytes of its hidden activations."""
    if model.gated_mlp:
        return _Kept(between=wide, products=2 * wide, always=0)
    if model.activation == "relu":  # its backward pass needs its result alone
        return _Kept(between=0, products=0, always=wide)
    return _Kept(between=wide, products=wide, always=0)


def _moe_ffn(component: Component, model: ModelSpec, request: ExplorationRequest) -> ComponentBytes:
    moe = model.moe
    assert moe is not None
    item = model.dtype.itemsize
    tokens = local_tokens(component, model)
    rows = _expert_rows(component, model, request)
    hidden = tokens * model.hidden_size * item
    gathered = rows * model.hidden_size * item
    wide = rows * moe.expert_ffn_hidden_size * item
    products = (2 if model.gated_mlp else 1) * wide
    between = hidden
    if component.experts != FUSED:
        between += gathered + wide
    elif moe.capacity_factor is not None:  # these keep their input, which is the rows that are left
        between += gathered
    always = hidden + _router_bytes(component, model)
    if moe.shared_expert_ffn_hidden_size:
        shared = _mlp(tokens * moe.shared_expert_ffn_hidden_size * item, model)
        between, products = between + shared.between, products + shared.products
        always += shared.always + (hidden if moe.shared_expert_gate else 0)
    kept = _Kept(between, products, always)
    copies = (2 if moe.capacity_factor is None else 3) * gathered
    return ComponentBytes(kept.saved(component.recompute), kept.live + copies, kept.live + copies + 3 * wide)


def _expert_rows(component: Component, model: ModelSpec, request: ExplorationRequest) -> int:
    """Return the rows that the experts' GEMMs process: the token-expert pairs that are kept, and their padding."""
    assert model.moe is not None
    return int(local_tokens(component, model) * model.moe.top_k * rows_of_pair(component, model, request))


def rows_of_pair(component: Component, model: ModelSpec, request: ExplorationRequest) -> float:
    """Return the rows of the experts' GEMMs for each token-expert pair: fewer than one if pairs are dropped.

    `bmm` pads every expert to the largest one, which has no more rows than its capacity.
    """
    assert model.moe is not None
    factor = model.moe.capacity_factor
    if component.experts == "bmm":
        fullest = max(1.0, largest_share(request) * model.moe.num_experts)
        return fullest if factor is None else min(fullest, factor)
    if factor is None:
        return 1.0
    from bexp.explorer.model.routes import dropped_share  # noqa: PLC0415 - NumPy takes long to import

    return 1.0 - dropped_share(model.moe, request.routing, local_tokens(component, model), request.seed)


def _router_bytes(component: Component, model: ModelSpec) -> int:
    """Return the bytes of probabilities, routing weights, routes, and the indices that sort the pairs and drop some."""
    assert model.moe is not None
    tokens = local_tokens(component, model)
    pairs = tokens * model.moe.top_k
    indices = (3 if model.moe.capacity_factor is None else 5) * INDEX_BYTES
    return tokens * model.moe.num_experts * FLOAT32_BYTES + pairs * (indices + model.dtype.itemsize)


def largest_share(request: ExplorationRequest) -> float:
    """Return the largest share of the token-expert pairs that one expert is expected to receive."""
    moe = request.shapes.moe
    assert moe is not None
    if request.routing.shares is not None:
        return max(request.routing.shares) / sum(request.routing.shares)
    if request.routing.kind == "zipf":
        total = sum(rank**-request.routing.zipf_exponent for rank in range(1, moe.num_experts + 1))
        return float(min(1 / moe.top_k, 1 / total))
    return 1 / moe.num_experts


def _head(component: Component, model: ModelSpec, request: ExplorationRequest) -> ComponentBytes:
    item = model.dtype.itemsize
    tokens = local_tokens(component, model)
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
    return min(OPTIMIZER_BUCKET_BYTES, FLOAT32_BYTES * largest // request.devices.optimizer_shards)
