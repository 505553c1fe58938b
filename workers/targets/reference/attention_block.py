"""The attention block: norm, QKV projection, positions, attention, output projection."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from bexp.explorer.cost.components import BlockRecompute
from bexp.explorer.model.model import ModelSpec
from bexp.kernels.attention import attention_backend
from bexp.kernels.context_parallel.attention import ContextParallel
from bexp.kernels.recomputation import recomputed
from bexp.kernels.selective_recompute import recomputable
from bexp.workers.instruments.kernel_shapes import torch_dtype
from bexp.workers.targets.reference.block import ResidualBlock, left_eager
from bexp.workers.targets.reference.norm import RMSNorm, build_norm
from bexp.workers.targets.reference.weights import Weights


class AttentionBlock(ResidualBlock):
    """Causal self-attention with one projection for queries, keys and values, in this order of heads.

    `backend` names the kernel. Selective recomputation runs the attention core (the kernel alone) again in backward.
    Recomputation of the projections runs everything before the core again, and keeps the kernel's own saved tensors.
    With `context_parallel` the block has this rank's tokens of each sequence, and attention alone asks the other ranks.
    `norm_over_ranks` is set where other ranks have heads that a norm spans, too.
    """

    recompute_to_the_end = True

    def __init__(
        self,
        model: ModelSpec,
        *,
        backend: str,
        bta_tile: int | None,
        recompute: BlockRecompute,
        device: torch.device,
        training: bool,
        generator: torch.Generator | None = None,
        context_parallel: ContextParallel | None = None,
    ) -> None:
        super().__init__(recompute=recompute, training=training, bta_tile=bta_tile)
        weights = Weights.of(model, device, training, generator)
        self.num_heads, self.num_groups, self.head_size = (
            model.num_attention_heads,
            model.query_groups,
            model.head_size,
        )
        query, key = self.num_heads * self.head_size, self.num_groups * self.head_size
        positions: Tensor | None = None
        if context_parallel is None:
            self.attend = attention_backend(backend).run
        else:
            self.attend = partial(context_parallel.attention, backend=backend)
            positions = context_parallel.positions(model.seq_length, device)
        self.spread = context_parallel is not None
        self.norm = build_norm(model, weights)
        self.w_qkv = weights.normal(query + 2 * key, model.hidden_size)
        self.b_qkv = weights.normal(query + 2 * key) if model.qkv_bias else None
        self.w_out = weights.normal(model.hidden_size, query)
        self.b_out = weights.normal(model.hidden_size) if model.attention_output_bias else None
        self.norm_heads = model.qk_norm == "head"
        self.norm_over_ranks: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
        sizes = {"none": None, "head": (self.head_size, self.head_size), "full": (query, key)}[model.qk_norm]
        self.q_norm = RMSNorm(sizes[0], weights) if sizes else None
        self.k_norm = RMSNorm(sizes[1], weights) if sizes else None
        self.rotary = Rotary(model, device, positions) if model.position == "rope" else None
        self.train(training)

    def core(self, x_BSD: Tensor) -> Tensor:
        """Return norm, projections and attention of a tile."""
        q, k, v = (heads.transpose(1, 2) for heads in self._project(recomputable(self.norm, x_BSD)))
        if self.recompute is BlockRecompute.SELECTIVE and self.training:
            out_BHSD = recomputed(self.attend, q, k, v)
        else:
            out_BHSD = self.attend(q, k, v)
        return F.linear(out_BHSD.transpose(1, 2).flatten(2), self.w_out, self.b_out)

    def compile_core(self) -> None:
        """Compile the branch; attention over several ranks stays eager inside."""
        if self.spread:
            self.attend = left_eager(self.attend)
        super().compile_core()

    def _project(self, h_BSD: Tensor) -> tuple[Tensor, ...]:
        """Queries (B, S, H, D), keys and values (B, S, G, D), with their positions."""
        q, k, v = recomputable(self._project_heads, h_BSD, product=True)
        if self.q_norm is not None:
            q, k = recomputable(self._norm_heads, q, k)
        return q, k, v

    def _project_heads(self, h_BSD: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values as views of one tensor; rotated in it unless they are to be normalised first."""
        sizes = (self.num_heads, self.num_groups, self.num_groups)
        qkv = F.linear(h_BSD, self.w_qkv, self.b_qkv).unflatten(-1, (sum(sizes), self.head_size))
        if self.rotary is None or self.q_norm is not None:
            return tuple(qkv.split(sizes, dim=2))
        return self.rotary.split(qkv, sizes, self.num_heads + self.num_groups)

    def _norm_heads(self, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        """Queries and keys normalised, then rotated."""
        assert self.q_norm is not None
        assert self.k_norm is not None
        if self.norm_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        elif self.norm_over_ranks is not None:
            q, k = self.norm_over_ranks(q, k, self.q_norm.weight, self.k_norm.weight)
        else:
            q = self.q_norm(q.flatten(2)).unflatten(-1, (-1, self.head_size))
            k = self.k_norm(k.flatten(2)).unflatten(-1, (-1, self.head_size))
        if self.rotary is not None:
            (q,) = self.rotary.split(q, (self.num_heads,), self.num_heads)
            (k,) = self.rotary.split(k, (self.num_groups,), self.num_groups)
        return q, k


_BASE = 10_000.0


class Rotary(nn.Module):
    """A rotation of the leading `rotary_size` entries of each head by an angle that grows with the position.

    The tables (S, 1, rotary_size) are computed once; the sine carries the sign of the rotation. `positions` (S) are
    those of the tokens in the forward pass, default 0, 1, 2 and so on.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, model: ModelSpec, device: torch.device, positions: Tensor | None = None) -> None:
        super().__init__()
        size = model.rotary_size
        exponents = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
        if positions is None:
            positions = torch.arange(model.seq_length, device=device)
        angles = torch.outer(positions.to(device, torch.float32), _BASE**-exponents).unsqueeze(1)
        dtype = torch_dtype(model.dtype)
        self.register_buffer("cos", torch.cat((angles.cos(), angles.cos()), -1).to(dtype), persistent=False)
        self.register_buffer("sin", torch.cat((-angles.sin(), angles.sin()), -1).to(dtype), persistent=False)

    def split(self, x_BSND: Tensor, sizes: tuple[int, ...], num_rotated: int) -> tuple[Tensor, ...]:
        """Rotate the first `num_rotated` heads of x (B, S, N, D) and split its heads into parts of the given sizes.

        x is rotated in place and must not be used again. The parts are views of it, so that queries, keys and values
        that were projected together are stored once.
        """
        seq_length = x_BSND.shape[1]
        cos, sin = self.cos[:seq_length], self.sin[:seq_length]
        if torch.compiler.is_compiling():
            rotated = _rotated(x_BSND[:, :, :num_rotated], cos, sin)
            return _split(torch.cat((rotated, x_BSND[:, :, num_rotated:]), dim=2), sizes)
        parts: tuple[Tensor, ...] = _RotateSplit.apply(  # type: ignore[no-untyped-call]  # untyped in torch
            x_BSND, cos, sin, sizes, num_rotated
        )
        return parts


class _RotateSplit(Function):
    @staticmethod
    def forward(
        ctx: Any, x_BSND: Tensor, cos: Tensor, sin: Tensor, sizes: tuple[int, ...], num_rotated: int
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.num_rotated = num_rotated
        _rotate(x_BSND[:, :, :num_rotated], cos, sin)
        return _split(x_BSND, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        grad_BSND = torch.cat(grads, dim=2)
        _rotate(grad_BSND[:, :, : ctx.num_rotated], cos, sin.neg())
        return grad_BSND, None, None, None, None


def _split(x_BSND: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(x_BSND.split(sizes, dim=2))


def _rotate(x_BSND: Tensor, cos: Tensor, sin: Tensor) -> None:
    x = x_BSND[..., : cos.shape[-1]]
    first, second = x.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    x.mul_(cos).addcmul_(swapped, sin)


def _rotated(x_BSND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = x_BSND[..., : cos.shape[-1]]
    first, second = x.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    return torch.cat((x * cos + swapped * sin, x_BSND[..., cos.shape[-1] :]), dim=-1)
