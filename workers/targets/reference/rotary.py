"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864), in the half-split layout of GPT-NeoX and Llama."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from bexp.explorer.model.model import ModelSpec
from bexp.workers.instruments.kernel_shapes import torch_dtype

_BASE = 10_000.0


class Rotary(nn.Module):
    """Rotates the leading `rotary_size` entries of each head by an angle that grows with the position.

    The tables (S, 1, rotary_size) are computed once; the sine carries the sign of the rotation. `positions` (S) are
    those of the tokens that will come, default 0, 1, 2 and so on.
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

        x is rotated where it lies and must not be used again: the parts are views of it, so that queries, keys and
        values that were projected together are stored once.
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
