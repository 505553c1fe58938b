"""The router's kernels as torch operators, so that torch.compile does not break the graph at them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bexp.kernels import router_kernels


@torch.library.custom_op(
    "bexp::route",
    mutates_args=(),
    schema="(Tensor scores, Tensor forced, bool norm_topk_prob, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
)
def route(
    scores_TE: Tensor, forced_TK: Tensor, norm_topk_prob: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """As `router_kernels.route`."""
    return router_kernels.route(scores_TE.contiguous(), forced_TK.contiguous(), norm_topk_prob, dtype)


@route.register_fake
def _(scores_TE: Tensor, forced_TK: Tensor, norm_topk_prob: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, top_k = forced_TK.shape
    routes = torch.empty_like(forced_TK, memory_format=torch.contiguous_format)
    weights = scores_TE.new_empty(num_tokens, top_k, dtype=dtype)
    return routes, weights, scores_TE.new_empty(2, num_tokens, dtype=torch.float32)


@torch.library.custom_op(
    "bexp::route_backward",
    mutates_args=(),
    schema="(Tensor scores, Tensor routes, Tensor normalizers, Tensor grad) -> Tensor",
)
def route_backward(scores_TE: Tensor, routes_TK: Tensor, normalizers: Tensor, grad_TK: Tensor) -> Tensor:
    """As `router_kernels.route_backward`."""
    return router_kernels.route_backward(scores_TE.contiguous(), routes_TK, normalizers, grad_TK.contiguous())


@route_backward.register_fake
def _(scores_TE: Tensor, routes_TK: Tensor, normalizers: Tensor, grad_TK: Tensor) -> Tensor:
    return torch.empty_like(scores_TE, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    routes, _, normalizers = output
    ctx.save_for_backward(inputs[0], routes, normalizers)
    ctx.mark_non_differentiable(routes, normalizers)


def _backward(ctx: Any, _: Any, grad_TK: Tensor, __: Any) -> tuple[Tensor, None, None, None]:
    return route_backward(*ctx.saved_tensors, grad_TK), None, None, None


route.register_autograd(_backward, setup_context=_setup)
