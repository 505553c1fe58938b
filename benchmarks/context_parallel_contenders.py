"""The contenders of benchmarks/context_parallel.py: attention over several devices, forward and backward in a call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from bexp.kernels.attention import attention_backend
from bexp.kernels.context_parallel.attention import ContextParallel

SDPA = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}

Pass = Callable[[], list[Tensor]]
"""Runs forward and backward; returns the output and the gradients of q, k and v. Axis 2 is the sequence."""


@dataclass(frozen=True)
class Problem:
    """One sequence of S tokens: q, k and v (1, heads, S, D) and the output's gradient. Every rank has all of it."""

    q: Tensor
    k: Tensor
    v: Tensor
    gradient: Tensor

    @property
    def seq_length(self) -> int:
        """Tokens of the whole sequence."""
        return self.q.shape[2]

    @property
    def flops(self) -> int:
        """FLOPs of causal attention, forward and backward: two and five products of half a square."""
        return 7 * self.seq_length**2 * self.q.shape[1] * self.q.shape[3]


def draw(seq_length: int, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Problem:
    """Make the same numbers on all ranks, in the layout of an attention block."""
    generator = torch.Generator(device).manual_seed(seq_length)
    num_heads, num_groups, head_size = heads
    q, k, v, gradient = (
        torch.randn(1, seq_length, n, head_size, dtype=dtype, device=device, generator=generator).transpose(1, 2)
        for n in (num_heads, num_groups, num_groups, num_heads)
    )
    return Problem(q, k, v, gradient)


def differentiate(attend: Callable[[Tensor, Tensor, Tensor], Tensor], parts: list[Tensor], gradient: Tensor) -> Pass:
    """Return a call of forward and backward of `attend` on q, k and v."""
    q, k, v = (x.detach().requires_grad_() for x in parts)

    def run() -> list[Tensor]:
        out = attend(q, k, v)
        return [out, *torch.autograd.grad(out, (q, k, v), gradient)]

    return run


def shards(problem: Problem, context: ContextParallel) -> tuple[list[Tensor], Tensor]:
    """A rank's q, k and v, and its part of the output's gradient."""
    *parts, gradient = (
        context.shard(x.transpose(1, 2)).transpose(1, 2) for x in (problem.q, problem.k, problem.v, problem.gradient)
    )
    return parts, gradient


@contextlib.contextmanager
def ours(problem: Problem, context: ContextParallel, backend: str) -> Iterator[Pass]:
    """One of our layouts."""
    yield differentiate(functools.partial(context.attention, backend=backend), *shards(problem, context))


@contextlib.contextmanager
def alone(problem: Problem, backend: str) -> Iterator[Pass]:
    """The same kernel on the whole sequence, on each device alone."""
    yield differentiate(attention_backend(backend).run, [problem.q, problem.k, problem.v], problem.gradient)


@functools.cache
def device_mesh(device_type: str, num_ranks: int) -> DeviceMesh:
    """A mesh of all ranks in one dimension. It is made once, because every mesh may make its own communicators."""
    return init_device_mesh(device_type, (num_ranks,))


@contextlib.contextmanager
def torchs(problem: Problem, zigzag: ContextParallel, backend: str, method: str, expands: bool) -> Iterator[Pass]:
    """torch's own context parallelism; `expands` repeats keys and values for every query head."""
    from torch.distributed.tensor.experimental import _attention, context_parallel  # noqa: PLC0415 - its place moves

    group = problem.q.shape[1] // problem.k.shape[1]
    is_grouped = group > 1 and not expands

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if expands:
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        with sdpa_kernel([SDPA[backend]]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)

    _attention.set_rotate_method(method)
    mesh = device_mesh(problem.q.device.type, zigzag.size)
    tokens = torch.zeros(1, problem.seq_length, device=problem.q.device)  # because it needs a buffer to split
    with context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[1]), torch.enable_grad():
        yield differentiate(attend, *shards(problem, zigzag))
