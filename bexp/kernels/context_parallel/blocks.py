"""Attention of some queries to a block of keys, with the log-sum-exp that is needed to merge blocks.

The fused kernels are torch's operators. Their backward passes also work for a block of a larger softmax: given the
output and log-sum-exp of *all* blocks, they return this block's share of the gradients (Dao, 2023, arXiv:2307.08691,
algorithm 2: P = exp(S - L), and D = rowsum(dO * O) belongs to the row and not to the block).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bexp.kernels.dtypes import dtype_name

_HALF = (torch.float16, torch.bfloat16)
_aten = torch.ops.aten


@dataclass(frozen=True)
class BlockAttention:
    """One implementation of a block of attention.

    `forward(q, k, v, causal, scale)` takes q (B, H, S, D) and k, v (B, G, T, D), where G divides H. It returns the
    output (B, H, S, D) and the natural logarithm of the sum of exponentials (B, H, S) in at least float32. Causal
    blocks have S = T. `backward(grad, q, k, v, out, lse, causal, scale)` takes the output and log-sum-exp of the whole
    softmax and returns dq, dk, dv in the inputs' dtype. All its tensors have a dense last axis.
    `unsupported_reason` is None if the implementation supports a dtype and head size on a device.
    """

    name: str
    unsupported_reason: Callable[[torch.dtype, int, torch.device], str | None]
    forward: Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
    backward: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, float],
        tuple[Tensor, Tensor, Tensor],
    ]


def block_attention(name: str) -> BlockAttention:
    """Return the implementation of the attention back end `name`. Raises ValueError if there is none."""
    if name not in _BLOCKS:
        raise ValueError(f"context parallelism has no attention back end '{name}'; there are {', '.join(_BLOCKS)}")
    return _BLOCKS[name]


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    if q.device.type == "cpu":
        k, v = _expand(q, k), _expand(q, v)
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, causal, scale=scale)
        return out, lse
    results = _aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal, False, scale=scale)
    return results[0], results[1]


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    if q.device.type == "cpu":
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            grad, q, _expand(q, k), _expand(q, v), out, lse, 0.0, causal, scale=scale
        )
        return dq, _shrink(dk, k), _shrink(dv, v)
    state = torch.empty(2, dtype=torch.uint64, device=q.device)  # a random state, which only dropout would read
    grads: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_backward.default(
        grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, state, state, scale=scale
    )
    return grads


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    results = _aten._scaled_dot_product_cudnn_attention.default(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return results[0], results[1].reshape(q.shape[:3])


def _cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    lse = lse.contiguous()
    if _cudnn_keeps_last_axis(q.device):
        lse = lse.unsqueeze(-1)
    state = torch.empty((), dtype=torch.int64, device=q.device)  # a random state, which only dropout would read
    grads: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_cudnn_attention_backward.default(
        _laid_out_as(grad, q),
        q,
        k,
        v,
        _laid_out_as(out, q),
        lse,
        state,
        state,
        None,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        scale=scale,
    )
    return grads


@functools.cache
def _cudnn_keeps_last_axis(device: torch.device) -> bool:
    """Whether the operator's log-sum-exp is (B, H, S, 1), as backward wants it back, or (B, H, S): versions differ."""
    q = torch.zeros(1, 1, 64, 64, dtype=torch.float16, device=device)
    return int(_aten._scaled_dot_product_cudnn_attention.default(q, q, q, None, True)[1].dim()) == 4


def _laid_out_as(x: Tensor, q: Tensor) -> Tensor:
    """Return x without gaps and with its axes in the order of q's axes in memory, as cuDNN lays out its output.

    Some versions of torch look cuDNN's plans up by the shapes and strides of q, k and v alone. A plan that was made for
    another layout of the output or of its gradient would silently read the wrong elements.
    """
    strides, size = [0] * x.dim(), 1
    for axis in sorted(range(x.dim()), key=lambda axis: (q.stride(axis), q.shape[axis])):
        strides[axis] = size
        size *= x.shape[axis]
    if all(n == 1 or stride == wanted for n, stride, wanted in zip(x.shape, x.stride(), strides, strict=True)):
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def _math_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Plain attention. All scores are in memory, in at least float32."""
    scores = _scores(q, k, causal, scale)
    lse = scores.logsumexp(-1)
    out = (scores - lse.unsqueeze(-1)).exp() @ _grouped(v, v)
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def _math_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    probabilities = (_scores(q, k, causal, scale) - lse.unflatten(1, (k.shape[1], -1)).unsqueeze(-1)).exp()
    grad_out = _grouped(grad, k)
    grad_scores = grad_out @ _grouped(v, v).mT - (grad_out * _grouped(out, k)).sum(-1, keepdim=True)
    grad_scores = grad_scores.mul_(probabilities).mul_(scale)
    dq = (grad_scores @ _grouped(k, k)).flatten(1, 2)
    dk = (grad_scores.mT @ _grouped(q, k)).sum(2)
    dv = (probabilities.mT @ grad_out).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """(B, G, H / G, S, T)."""
    scores: Tensor = _grouped(q, k) @ _grouped(k, k).mT * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """Return x (B, H, S, D) in at least float32, with its heads grouped by the head of k that they share."""
    grouped: Tensor = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(1, (k.shape[1], -1))
    return grouped


def _expand(q: Tensor, k: Tensor) -> Tensor:
    """Repeat keys or values to one for each query head, for kernels without grouped heads."""
    group = q.shape[1] // k.shape[1]
    return k if group == 1 else k.repeat_interleave(group, dim=1)


def _shrink(grad: Tensor, k: Tensor) -> Tensor:
    """Return the gradient of `_expand`."""
    return grad if grad.shape[1] == k.shape[1] else grad.unflatten(1, (k.shape[1], -1)).sum(2)


def _flash_reason(dtype: torch.dtype, head_size: int, device: torch.device) -> str | None:
    if device.type == "cuda":
        if dtype not in _HALF:
            return f"flash attention takes float16 and bfloat16, not {dtype_name(dtype)}"
        if head_size > 256:
            return f"flash attention takes a head_dim of at most 256, not {head_size}"
    return None


def _cudnn_reason(dtype: torch.dtype, head_size: int, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"cuDNN attention needs a CUDA device, not {device.type}"
    if dtype not in _HALF:
        return f"cuDNN attention takes float16 and bfloat16, not {dtype_name(dtype)}"
    if head_size % 8 or head_size > 128:
        return f"cuDNN attention takes a head_dim that is a multiple of 8 and at most 128, not {head_size}"
    return None


def _math_reason(dtype: torch.dtype, head_size: int, device: torch.device) -> str | None:
    return None


_BLOCKS = {
    block.name: block
    for block in (
        # FlashAttention-2 on CUDA, with groups of its own; torch's flash kernel on the CPU, where keys are expanded.
        BlockAttention("flash", _flash_reason, _flash_forward, _flash_backward),
        BlockAttention("cudnn", _cudnn_reason, _cudnn_forward, _cudnn_backward),
        BlockAttention("math", _math_reason, _math_forward, _math_backward),
    )
}
