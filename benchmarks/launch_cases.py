"""The shapes whose launches are timed, their inputs, and how they are run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.expert_reference import expert_ffn


@dataclass(frozen=True)
class Gemm:
    """Rows of one width by the matrices of experts that all have as many rows."""

    num_experts: int
    rows_per_expert: int
    k: int
    n: int


@dataclass(frozen=True)
class Layer:
    """An expert FFN of gate, up and down projection."""

    num_tokens: int
    num_experts: int
    top_k: int
    token_size: int
    hidden_size: int


GEMMS = (Gemm(8, 16, 512, 512), Gemm(64, 8, 512, 256))
SMALL_LAYERS = (Layer(64, 8, 2, 512, 256), Layer(128, 64, 8, 512, 128), Layer(256, 8, 1, 512, 256))


def both_ways(
    forward: Callable[..., Tensor], inputs: tuple[Tensor, ...], others: tuple[Any, ...], grad: Tensor
) -> tuple[Tensor, ...]:
    """Forward and backward: the result, and the gradients of `inputs`."""
    out = forward(*inputs, *others)
    return (out, *torch.autograd.grad(out, inputs, grad))


@torch.no_grad()
def without_gradients(forward: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
    """Forward alone."""
    return forward(*inputs)


def random(shape: tuple[int, ...], device: torch.device, scale: float = 1.0) -> Tensor:
    """Normal numbers of that standard deviation, in bfloat16."""
    return torch.randn(shape, device=device, dtype=torch.bfloat16).mul_(scale)


def layer_inputs(layer: Layer, device: torch.device) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """x, routing weights, w_in and w_out, which are differentiated; routes; the gradient of the output."""
    torch.manual_seed(0)
    sizes = (layer.num_tokens, layer.token_size)
    scores = torch.rand(layer.num_tokens, layer.num_experts, device=device)
    routes = scores.topk(layer.top_k).indices
    weights = torch.softmax(torch.randn(routes.shape, device=device), -1).to(torch.bfloat16)
    w_in = random((layer.num_experts, layer.token_size, 2 * layer.hidden_size), device, layer.token_size**-0.5)
    w_out = random((layer.num_experts, layer.hidden_size, layer.token_size), device, layer.hidden_size**-0.5)
    inputs = tuple(tensor.requires_grad_() for tensor in (random(sizes, device), weights, w_in, w_out))
    return inputs, routes, random(sizes, device)


def gradients_of_reference(inputs: tuple[Tensor, ...], routes: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """The output and the gradients in float64."""
    exact = tuple(tensor.detach().double().requires_grad_() for tensor in inputs)
    x, weights, w_in, w_out = exact
    out = expert_ffn(x, routes, weights, w_in, w_out, "silu")
    return (out, *torch.autograd.grad(out, exact, grad.double()))
