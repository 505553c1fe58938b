"""The blocks written plainly, for float64; parameters by the names that the blocks give them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bexp.explorer.model.model import ModelSpec
from tests.bexp.kernels import references as kernels

EPSILON = 1e-6


def norm(model: ModelSpec, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """RMSNorm or LayerNorm with the parameters under `norm.`."""
    if model.norm == "rmsnorm":
        return rms(x, p["norm.weight"])
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt()
    return scaled * p["norm.weight"] + p["norm.bias"]


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """x over its root mean square, scaled."""
    return x / (x.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt() * weight


def rotate(x: Tensor, rotary_size: int) -> Tensor:
    """RoPE on (B, S, N, D): entries i and i + r/2 turn together by position * 10000^(-2i/r)."""
    columns = [x[..., i] for i in range(x.shape[-1])]
    half = rotary_size // 2
    positions = torch.arange(x.shape[1], dtype=x.dtype).view(1, -1, 1)
    for i in range(half):
        angle = positions * 10000 ** (-2 * i / rotary_size)
        a, b = columns[i], columns[i + half]
        columns[i] = a * angle.cos() - b * angle.sin()
        columns[i + half] = b * angle.cos() + a * angle.sin()
    return torch.stack(columns, -1)


def attention_block(model: ModelSpec, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """`x + attention(norm(x))`."""
    heads, groups, size = model.num_attention_heads, model.query_groups, model.head_size
    h = norm(model, p, x)
    qkv = h @ p["w_qkv"].T + p.get("b_qkv", torch.zeros(1, dtype=x.dtype))
    q, k, v = (
        qkv[..., : heads * size],
        qkv[..., heads * size : (heads + groups) * size],
        qkv[..., (heads + groups) * size :],
    )
    if model.qk_norm == "full":
        q, k = rms(q, p["q_norm.weight"]), rms(k, p["k_norm.weight"])
    batch, length = x.shape[:2]
    q, k, v = (
        q.reshape(batch, length, heads, size),
        k.reshape(batch, length, groups, size),
        v.reshape(batch, length, groups, size),
    )
    if model.qk_norm == "head":
        q, k = rms(q, p["q_norm.weight"]), rms(k, p["k_norm.weight"])
    if model.position == "rope":
        q, k = rotate(q, model.rotary_size), rotate(k, model.rotary_size)
    out = kernels.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    out = out.transpose(1, 2).reshape(batch, length, heads * size)
    return x + out @ p["w_out"].T + p.get("b_out", torch.zeros(1, dtype=x.dtype))


def mlp(model: ModelSpec, p: Mapping[str, Tensor], prefix: str, h: Tensor) -> Tensor:
    """The MLP with the parameters under `prefix`."""
    zero = torch.zeros(1, dtype=h.dtype)
    hidden = h @ p[prefix + "w_in"].T + p.get(prefix + "b_in", zero)
    act = kernels.activation(hidden, model.activation, model.gated_mlp)
    return act @ p[prefix + "w_out"].T + p.get(prefix + "b_out", zero)


def dense_ffn(model: ModelSpec, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """`x + mlp(norm(x))`."""
    return x + mlp(model, p, "mlp.", norm(model, p, x))


def moe_ffn(model: ModelSpec, p: Mapping[str, Tensor], x: Tensor, routes: Tensor) -> Tensor:
    """`x + experts(norm(x)) + shared(norm(x))`, every token through the experts that `routes` gives it."""
    moe = model.moe
    assert moe is not None
    h = norm(model, p, x).flatten(0, 1)
    scores = torch.exp(h @ p["w_router"].T)
    weights = (scores / scores.sum(-1, keepdim=True)).gather(1, routes)
    if moe.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    if moe.capacity_factor is not None:
        weights = weights * kernels.kept_pairs(routes, weights, moe.capacity(h.shape[0]))
    out = kernels.experts(h, routes, weights, p["w_in"], p["w_out"], model.activation)
    if moe.shared_expert_ffn_hidden_size:
        shared = mlp(model, p, "shared.", h)
        if moe.shared_expert_gate:
            shared = shared / (1 + torch.exp(-(h @ p["w_shared_gate"].T)))
        out = out + shared
    return x + out.view_as(x)
