"""Turns router scores into routes and routing weights (softmax, top-k, gather), in one kernel if Triton runs here.

In plain torch this takes eight kernels, forward and backward together. Each reads or writes a float for every token
and expert. If there are many experts and a small top_k, this costs more than the activation functions of the experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from bexp.kernels.triton_support import triton_reason

_MAX_EXPERTS = 1024
_MAX_TOP_K = 16  # because the kernel finds one maximum after the other
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def route(
    scores_TE: Tensor, forced_TK: Tensor, *, norm_topk_prob: bool, dtype: torch.dtype, fused: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Return routes (T, K) int64 and their weights (T, K) in `dtype`, through which the scores get their gradient.

    The weights are the K largest values of the softmax over all experts, in float32. If `norm_topk_prob` is set, they
    are divided by their sum. `forced_TK` (T, K) names experts that are chosen whatever their scores. The order of a
    token's routes is not defined. `fused` chooses between the kernel and plain torch. By default the kernel is used on
    CUDA if Triton is installed, for a top_k of up to 16 and up to 1024 experts.
    """
    if fused is None:
        fused = _is_fusible(scores_TE, forced_TK.shape[1])
    if fused and torch.compiler.is_compiling():
        from bexp.kernels import router_operators  # noqa: PLC0415 - needs Triton

        chosen, shares, _ = router_operators.route(scores_TE, forced_TK, norm_topk_prob, dtype)
        return chosen, shares
    if fused:
        routes, weights = _Route.apply(scores_TE, forced_TK, norm_topk_prob, dtype)  # type: ignore[no-untyped-call]  # in torch
        return routes, weights
    probabilities_TE = torch.softmax(scores_TE, dim=-1, dtype=torch.float32)
    raised_TE = scores_TE.detach().scatter(1, forced_TK, float("inf"))
    routes_TK = torch.topk(raised_TE, forced_TK.shape[1], dim=-1, sorted=False).indices
    weights_TK = probabilities_TE.gather(1, routes_TK)
    if norm_topk_prob:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return routes_TK, weights_TK.to(dtype)


def score(h_TD: Tensor, w_router: Tensor) -> tuple[Tensor, Tensor]:
    """Return the router's scores (T, E) for hidden states (T, D) and its matrix (E, D), and the hidden states again.

    Give the second result to the experts. Its gradient is then added within the product that computes the router's
    gradient, which saves one pass over memory. In a compiled graph, the compiler does this by itself.
    """
    if torch.compiler.is_compiling():
        return F.linear(h_TD, w_router), h_TD
    scores_TE, passed_TD = _Score.apply(h_TD, w_router)  # type: ignore[no-untyped-call]  # untyped in torch
    return scores_TE, passed_TD


class _Score(Function):
    @staticmethod
    def forward(ctx: Any, h_TD: Tensor, w_router: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(h_TD, w_router)
        return F.linear(h_TD, w_router), h_TD.view_as(h_TD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TE: Tensor, grad_TD: Tensor) -> tuple[Tensor | None, Tensor | None]:
        h_TD, w_router = ctx.saved_tensors
        needs_h, needs_w = ctx.needs_input_grad
        grad_h = None
        if needs_h:
            # In place, because the experts' gradient is their own tensor. A shared one would be a view or expanded.
            is_own = grad_TD.is_contiguous() and not grad_TD._is_view()
            grad_h = grad_TD.addmm_(grad_TE, w_router) if is_own else torch.addmm(grad_TD, grad_TE, w_router)
        return grad_h, grad_TE.t() @ h_TD if needs_w else None


def _is_fusible(scores_TE: Tensor, top_k: int) -> bool:
    return (
        scores_TE.is_cuda
        and scores_TE.dtype in _DTYPES
        and scores_TE.shape[0] > 0
        and scores_TE.shape[1] <= _MAX_EXPERTS
        and top_k <= _MAX_TOP_K
        and _has_kernel(scores_TE.device)
    )


def _has_kernel(device: torch.device) -> bool:
    return triton_reason(device) is None


# All that `torch.compiler.assume_constant_result` does, except that it imports the compiler, which takes seconds.
_has_kernel._dynamo_marked_constant = True  # type: ignore[attr-defined] # torch reads it


class _Route(Function):
    @staticmethod
    def forward(
        ctx: Any, scores_TE: Tensor, forced_TK: Tensor, norm_topk_prob: bool, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        from bexp.kernels import router_kernels  # noqa: PLC0415 - needs Triton

        scores_TE = scores_TE.contiguous()
        routes, weights, normalizers = router_kernels.route(scores_TE, forced_TK.contiguous(), norm_topk_prob, dtype)
        ctx.save_for_backward(scores_TE, routes, normalizers)
        ctx.mark_non_differentiable(routes)
        return routes, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, grad_TK: Tensor) -> tuple[Tensor, None, None, None]:
        from bexp.kernels import router_kernels  # noqa: PLC0415 - needs Triton

        scores_TE, routes, normalizers = ctx.saved_tensors
        return router_kernels.route_backward(scores_TE, routes, normalizers, grad_TK.contiguous()), None, None, None
