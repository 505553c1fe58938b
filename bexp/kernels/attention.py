"""Back ends of causal attention. None of them falls back to another one silently.

The fused back ends call the operators that `scaled_dot_product_attention` dispatches to, because entering
`sdpa_kernel` for every call costs the host as much as two kernel launches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bexp.kernels.dtypes import dtype_name
from bexp.kernels.probe import failure_of
from bexp.kernels.selective_recompute import recomputable
from bexp.kernels.shapes import AttentionShape, Support

_HALF = (torch.float16, torch.bfloat16)
_PROBE_TOKENS = 64


@dataclass(frozen=True)
class AttentionBackend:
    """One implementation of causal attention.

    `run` takes q (B, H, S, D) and k, v (B, G, S, D), where G divides H. Any strides with a dense last axis will do. It
    returns (B, H, S, D). `unsupported_reason` returns why the back end cannot serve a shape on a device, or None.
    """

    name: str
    stock: bool
    unsupported_reason: Callable[[AttentionShape, torch.device], str | None]
    run: Callable[[Tensor, Tensor, Tensor], Tensor]


def attention_backend(name: str) -> AttentionBackend:
    """Return the back end called `name`. Raises ValueError if there is none."""
    if name not in _BACKENDS:
        raise ValueError(f"unknown attention back end '{name}'; there are {', '.join(_BACKENDS)}")
    return _BACKENDS[name]


def attention_support(shape: AttentionShape, device: torch.device) -> tuple[Support, ...]:
    """Return whether each back end serves `shape` on `device`, and why not."""
    return tuple(
        Support(backend.name, backend.unsupported_reason(shape, device), backend.stock)
        for backend in _BACKENDS.values()
    )


def default_attention_backend(shape: AttentionShape, device: torch.device) -> str:
    """Return the back end that torch's scaled_dot_product_attention picks by itself.

    If torch does not say, or picks one that does not serve the shape, the first usable one in torch's order is
    returned.
    """
    choose = getattr(torch, "_fused_sdp_choice", None)
    if choose is not None:
        q, k, v = _example(shape, device, min(shape.seq_length, 1024))
        choice = choose(q, k, v, None, 0.0, True, enable_gqa=q.shape[1] != k.shape[1])
        name = {
            SDPBackend.FLASH_ATTENTION.value: "flash",
            SDPBackend.CUDNN_ATTENTION.value: "cudnn",
            SDPBackend.EFFICIENT_ATTENTION.value: "efficient",
            SDPBackend.MATH.value: "math",
        }.get(int(choice))
        if name is not None and _BACKENDS[name].unsupported_reason(shape, device) is None:
            return name
    usable = {support.name for support in attention_support(shape, device) if support.usable}
    return next((name for name in ("flash", "cudnn", "efficient", "math") if name in usable), "math")


def _flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention-2 (Dao, 2023, arXiv:2307.08691). GQA is native on CUDA; on CPU keys and values are expanded."""
    if q.device.type == "cpu":
        k, v = _expand(q, k), _expand(q, v)
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]
        return out
    head_dim = q.shape[-1]
    padding = -head_dim % 8
    if padding:
        q, k, v = (F.pad(x, (0, padding)) for x in (q, k, v))
    out = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, True, False, scale=1.0 / math.sqrt(head_dim)
    )[0]
    return out[..., :head_dim] if padding else out


def _cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """CuDNN's fused attention; GQA is native."""
    trained = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    out: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, trained, 0.0, True, False)[0]
    return out


def _efficient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Memory-efficient attention (Rabe and Staats, 2021, arXiv:2112.05682), from xFormers.

    It does not support grouped heads, so keys and values are expanded to one for each query head. This takes memory.
    """
    trained = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    out: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, _expand(q, k), _expand(q, v), None, trained, 0.0, True
    )[0]
    return out


def _math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Plain matmul, softmax, matmul. The whole (S, S) score matrix is in memory. torch expands the groups itself."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def _expand(q: Tensor, k: Tensor) -> Tensor:
    """Repeat keys or values to one for each query head."""
    group = q.shape[1] // k.shape[1]
    return k if group == 1 else recomputable(lambda x: x.repeat_interleave(group, dim=1), k)


def _flash_reason(shape: AttentionShape, device: torch.device) -> str | None:
    if device.type == "cuda":
        if shape.dtype not in _HALF:
            return f"flash attention takes float16 and bfloat16, not {dtype_name(shape.dtype)}"
        if shape.head_size > 256:
            return f"flash attention takes a head_dim of at most 256, not {shape.head_size}"
    return _try(_flash, shape, device)


def _cudnn_reason(shape: AttentionShape, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"cuDNN attention needs a CUDA device, not {device.type}"
    if shape.dtype not in _HALF:
        return f"cuDNN attention takes float16 and bfloat16, not {dtype_name(shape.dtype)}"
    if shape.head_size % 8 or shape.head_size > 128:
        return f"cuDNN attention takes a head_dim that is a multiple of 8 and at most 128, not {shape.head_size}"
    return _try(_cudnn, shape, device)


def _efficient_reason(shape: AttentionShape, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"memory-efficient attention needs a CUDA device, not {device.type}"
    multiple = 16 // shape.dtype.itemsize
    if shape.head_size % multiple:
        return (
            f"memory-efficient attention takes a head_dim that is a multiple of {multiple} "
            f"in {dtype_name(shape.dtype)}, not {shape.head_size}"
        )
    return _try(_efficient, shape, device)


def _math_reason(shape: AttentionShape, device: torch.device) -> str | None:
    return _try(_math, shape, device)


def _try(run: Callable[[Tensor, Tensor, Tensor], Tensor], shape: AttentionShape, device: torch.device) -> str | None:
    q, k, v = _example(shape, device, _PROBE_TOKENS)
    return failure_of(lambda: run(q, k, v), device)


def _example(shape: AttentionShape, device: torch.device, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of one sequence, in the layout of an attention block."""
    heads, groups = shape.num_heads, shape.num_query_groups
    size = (1, num_tokens, heads + 2 * groups, shape.head_size)
    qkv = torch.randn(size, dtype=shape.dtype, device=device, requires_grad=True)
    q, k, v = (part.transpose(1, 2) for part in qkv.split((heads, groups, groups), dim=2))
    return q, k, v


_BACKENDS = {
    backend.name: backend
    for backend in (
        AttentionBackend("flash", True, _flash_reason, _flash),
        AttentionBackend("cudnn", True, _cudnn_reason, _cudnn),
        AttentionBackend("efficient", True, _efficient_reason, _efficient),
        AttentionBackend("math", True, _math_reason, _math),
    )
}
