"""Parameter counts by module, equal to those of Hugging Face transformers for the model types that can be imported."""

from __future__ import annotations

from bexp.explorer.model.model import DType, LayerKind, ModelSpec
from bexp.explorer.model.optimizers import MUON
from bexp.explorer.model.parts import ExploredModel, ModelParts
from bexp.explorer.model.training import OptimizerSpec


def count_norm(model: ModelSpec) -> int:
    """Return the parameters of one normalisation over the hidden size."""
    return model.hidden_size * (2 if model.norm == "layernorm" else 1)


def count_attention(model: ModelSpec) -> int:
    """Return the parameters of one attention block: its norm, the QKV and output projections, and the QK norms."""
    query = model.num_attention_heads * model.head_size
    key = model.query_groups * model.head_size
    biases = (query + 2 * key if model.qkv_bias else 0) + (model.hidden_size if model.attention_output_bias else 0)
    qk_norm = {"none": 0, "head": 2 * model.head_size, "full": query + key}[model.qk_norm]
    return count_norm(model) + _projections(model) + biases + qk_norm


def repeated_in_attention(model: ModelSpec) -> int:
    """Return the parameters of one attention block that every tensor-parallel device has whole.

    They are its norm, the bias of its output, and norms of single heads. Norms over all heads are split like the heads.
    """
    bias = model.hidden_size if model.attention_output_bias else 0
    return count_norm(model) + bias + (2 * model.head_size if model.qk_norm == "head" else 0)


def count_dense_ffn(model: ModelSpec) -> int:
    """Return the parameters of one dense FFN block with its norm."""
    return count_norm(model) + _mlp(model, model.ffn_hidden_size)


def count_moe_ffn(model: ModelSpec) -> int:
    """Return the parameters of one expert FFN block: norm, router, experts, shared experts and their gate."""
    moe = model.moe
    if moe is None:
        return 0
    expert = (3 if model.gated_mlp else 2) * model.hidden_size * moe.expert_ffn_hidden_size
    shared = moe.shared_expert_ffn_hidden_size
    return repeated_in_moe_ffn(model) + moe.num_experts * expert + (_mlp(model, shared) if shared else 0)


def repeated_in_moe_ffn(model: ModelSpec) -> int:
    """Return the parameters of an expert FFN block without its experts: norm, router, and the gate of shared experts.

    Every tensor-parallel or expert-parallel device has them whole.
    """
    moe = model.moe
    if moe is None:
        return 0
    gate = model.hidden_size if moe.shared_expert_gate else 0
    return count_norm(model) + model.hidden_size * moe.num_experts + gate


def count_layer(model: ModelSpec, kind: LayerKind) -> int:
    """Return the parameters of one decoder layer."""
    return count_attention(model) + (count_dense_ffn(model) if kind is LayerKind.DENSE else count_moe_ffn(model))


def count_embedding(model: ModelSpec) -> int:
    """Return the parameters of the token embedding and, if positions are learned, the position embedding."""
    positions = model.position_rows * model.hidden_size if model.position == "learned" else 0
    return model.vocab_size * model.hidden_size + positions


def count_head(model: ModelSpec) -> int:
    """Return the parameters of the final norm and the output projection; a tied projection belongs to the embedding."""
    projection = 0 if model.tie_embeddings else model.vocab_size * model.hidden_size
    return count_norm(model) + projection + (model.vocab_size if model.lm_head_bias else 0)


def count_parameters(model: ExploredModel) -> int:
    """Return the number of all parameters of the model."""
    if isinstance(model, ModelParts):
        return model.num_parameters
    layers = sum(model.count_layers(kind) * count_layer(model, kind) for kind in LayerKind)
    return count_embedding(model) + layers + count_head(model)


def count_hidden_matrices(model: ModelSpec) -> int:
    """Return the parameters of two dimensions in all layers: neither vectors nor experts, which are one tensor."""
    ffn = {LayerKind.DENSE: _matrices(model, model.ffn_hidden_size)}
    if model.moe is not None:
        beside = repeated_in_moe_ffn(model) - count_norm(model)
        ffn[LayerKind.MOE] = beside + _matrices(model, model.moe.shared_expert_ffn_hidden_size)
    return sum(model.count_layers(kind) * (_projections(model) + size) for kind, size in ffn.items())


def count_states(model: ModelSpec, optimizer: OptimizerSpec) -> int:
    """Return the numbers in an optimizer's moments. Muon has one of each hidden matrix, and AdamW's two of the rest."""
    fewer = count_hidden_matrices(model) if optimizer.name == MUON else 0
    return optimizer.num_states * count_parameters(model) - fewer


def master_bytes(model: ModelParts) -> int:
    """Return the bytes of a float32 copy of the trained parameters, which also exist in the model's dtype."""
    return model.trainable_bytes // model.dtype.itemsize * DType.FLOAT32.itemsize


def _projections(model: ModelSpec) -> int:
    return 2 * model.hidden_size * model.head_size * (model.num_attention_heads + model.query_groups)


def _matrices(model: ModelSpec, hidden: int) -> int:
    return (3 if model.gated_mlp else 2) * model.hidden_size * hidden


def _mlp(model: ModelSpec, hidden: int) -> int:
    biases = ((2 if model.gated_mlp else 1) * hidden + model.hidden_size) if model.mlp_bias else 0
    return _matrices(model, hidden) + biases
