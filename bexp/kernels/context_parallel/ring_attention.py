"""Attention on a ring, forward and backward. A rank computes with one block of keys while it receives the next.

At step i a rank holds the block of its i-th predecessor. Forward passes keys and values on N - 1 times and merges the
outputs of the blocks. Backward passes them on again. Their gradients follow one step behind: they start at the first
rank after the owner, collect each rank's part, and reach the owner after N - 1 transfers. The owner computes its own
part in two halves, so that this work hides the first transfer of keys and values and the last transfer of gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from bexp.kernels.context_parallel.blocks import BlockAttention
from bexp.kernels.context_parallel.layouts import RingStep
from bexp.kernels.context_parallel.merging import RunningAttention
from bexp.kernels.context_parallel.ring import Passage, Ring

_KEYS_AND_VALUES, _GRADIENTS = 0, 1
"""Tags of the two kinds of messages, for transports that would confuse them."""


@dataclass(frozen=True)
class RingAttention:
    """How one rank attends: which part of each block (its own first), and by which kernel."""

    ring: Ring
    steps: tuple[RingStep | None, ...]
    block: BlockAttention
    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output (B, H, S, D) and the log-sum-exp (B, H, S) of this rank's queries."""
        running = RunningAttention(sum(step is not None for step in self.steps))
        for step, k_block, v_block in self.blocks(k, v):
            if step is not None:
                running.merge(
                    *self.block.forward(
                        q[:, :, step.first_query :],
                        k_block[:, :, : step.num_keys],
                        v_block[:, :, : step.num_keys],
                        step.causal,
                        self.scale,
                    ),
                    step.first_query,
                )
        return running.result()

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v, accumulated in at least float32."""
        return _RingBackward(self, grad, q, k, v, out, lse).run()

    def blocks(self, k: Tensor, v: Tensor) -> Iterator[tuple[RingStep | None, Tensor, Tensor]]:
        """Yield the part of each block to attend to, with its keys and values, while the next block arrives."""
        if self.ring.size == 1:
            yield self.steps[0], k, v
            return
        held = torch.stack((k.transpose(1, 2), v.transpose(1, 2)))
        spare = torch.empty_like(held)
        for i, step in enumerate(self.steps):
            passage: Passage | None = None
            if i + 1 < self.ring.size:
                passage = self.ring.pass_on(held, spare, tag=_KEYS_AND_VALUES)
            yield step, held[0].transpose(1, 2), held[1].transpose(1, 2)
            if passage is not None:
                passage.wait()
                held, spare = spare, held


class _RingBackward:
    """One backward pass, with the tensors that its steps share."""

    def __init__(
        self, plan: RingAttention, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> None:
        self.plan = plan
        if grad.stride() != out.stride():
            grad = torch.empty_like(out).copy_(grad)
        self.q, self.k, self.v = q, k, v
        self.rows = {0: (grad, out, lse)}
        self.high = torch.promote_types(q.dtype, torch.float32)
        self.dq = torch.zeros_like(out, dtype=self.high)

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v."""
        ring = self.plan.ring
        blocks = self.plan.blocks(self.k, self.v)
        own, k, v = next(blocks)
        assert own is not None, "a rank attends to its own block"
        if ring.size == 1:
            grad, out, lse = self.rows[0]
            return self.plan.block.backward(grad, self.q, k, v, out, lse, own.causal, self.plan.scale)
        first, second = _halves(self.q, self.k)
        parts = [(first, self._own(own, first))] if first is not None else []
        shape = (2, k.shape[0], k.shape[2], k.shape[1], k.shape[3])
        collected, spare = (torch.empty(shape, dtype=self.high, device=k.device) for _ in range(2))
        passage: Passage | None = None
        for step, k_block, v_block in blocks:
            grads = None if step is None else self._block(step, k_block, v_block)
            if passage is None:
                _put(collected, grads)
            else:
                passage.wait()
                collected, spare = spare, collected
                _add(collected, grads)
            passage = ring.pass_on(collected, spare, tag=_GRADIENTS)
        parts.append((second, self._own(own, second)))
        assert passage is not None, "a ring has another rank"
        passage.wait()
        for (batch, _, groups), grads in parts:
            _add(spare[:, batch, :, groups], grads)
        dk, dv = (gradient.transpose(1, 2).to(self.k.dtype) for gradient in spare)
        return self.dq.to(self.q.dtype), dk, dv

    def _block(self, step: RingStep, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of a step's keys and values; add the gradients of its queries to the sum."""
        first, last = step.first_query, step.num_keys
        if first not in self.rows:
            self.rows[first] = _later(self.rows[0], first)
        grad, out, lse = self.rows[first]
        dq, dk, dv = self.plan.block.backward(
            grad,
            self.q[:, :, first:],
            k[:, :, :last],
            v[:, :, :last],
            out,
            lse,
            step.causal,
            self.plan.scale,
        )
        self.dq[:, :, first:].add_(dq)
        return dk, dv

    def _own(self, step: RingStep, part: _Part) -> tuple[Tensor, Tensor]:
        """Return the gradients of some of this rank's own keys and values."""
        batch, heads, groups = part
        grad, out, lse = (x[batch, heads] for x in self.rows[0])
        dq, dk, dv = self.plan.block.backward(
            grad,
            self.q[batch, heads],
            self.k[batch, groups],
            self.v[batch, groups],
            out,
            lse,
            step.causal,
            self.plan.scale,
        )
        self.dq[batch, heads].add_(dq)
        return dk, dv


_Part = tuple[slice, slice, slice]
"""A part of the work: some sequences, some of their query heads, and the key heads that these share."""


def _halves(q: Tensor, k: Tensor) -> tuple[_Part | None, _Part]:
    """Split the sequences, or else the heads, into two equal parts; return one part if neither can be split."""
    everything = slice(None)
    if q.shape[0] > 1:
        middle = q.shape[0] // 2
        return (slice(0, middle), everything, everything), (slice(middle, None), everything, everything)
    if k.shape[1] > 1:
        middle, group = k.shape[1] // 2, q.shape[1] // k.shape[1]
        return (
            (everything, slice(0, middle * group), slice(0, middle)),
            (everything, slice(middle * group, None), slice(middle, None)),
        )
    return None, (everything, everything, everything)


def _later(rows: tuple[Tensor, ...], first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows from `first` on, copied once if otherwise every kernel would copy them."""
    grad, out, lse = (x[:, :, first:] for x in rows)
    if grad.shape[0] > 1:
        grad, out = grad.clone(), out.clone()
    return grad, out, lse.contiguous()


def _put(collected: Tensor, grads: tuple[Tensor, Tensor] | None) -> None:
    """Start a sum in (2, B, S, G, D): gradients (B, G, T, D) of the first T keys and values, or zeros."""
    if grads is None:
        collected.zero_()
        return
    for total, gradient in zip(collected, grads, strict=True):
        total[:, : gradient.shape[2]].copy_(gradient.transpose(1, 2))
        total[:, gradient.shape[2] :].zero_()


def _add(collected: Tensor, grads: tuple[Tensor, Tensor] | None) -> None:
    """Add gradients to the sum that `_put` started."""
    for total, gradient in zip(collected, grads or (), strict=False):
        total[:, : gradient.shape[2]].add_(gradient.transpose(1, 2))


def ring_attention(plan: RingAttention, q: Tensor, k: Tensor, v: Tensor, tile: int) -> Tensor:
    """Return the attention of q (B, H, S, D) to the k, v (B, G, S, D) of all ranks, `tile` sequences at a time.

    It is differentiable.
    """
    out: Tensor = _RingFunction.apply(q, k, v, plan, tile)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


class _RingFunction(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: RingAttention, tile: int) -> Tensor:
        outs, sums = zip(*(plan.forward(*parts) for parts in _tiles(tile, q, k, v)), strict=True)
        out, lse = _joined(outs), sums[0] if len(sums) == 1 else torch.cat(sums)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.tile = plan, tile
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        tiles = [ctx.plan.backward(*parts) for parts in _tiles(ctx.tile, grad, *ctx.saved_tensors)]
        dq, dk, dv = map(_joined, zip(*tiles, strict=True))
        return dq, dk, dv, None, None


def _tiles(tile: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(x.split(tile) for x in tensors), strict=True)


def _joined(parts: tuple[Tensor, ...]) -> Tensor:
    """Collect tiles (b, H, S, D) of a batch in one tensor with the memory layout (B, S, H, D)."""
    return parts[0] if len(parts) == 1 else torch.cat([x.transpose(1, 2) for x in parts]).transpose(1, 2)
