"""Router scores become routes and routing weights: softmax, top-k and gather, in one kernel if Triton runs here.

In plain torch these are eight kernels, forward and backward, and each reads or writes a float for every token and
expert. If there are many experts and few of them a token, that costs more than the activation of the experts.
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
_MAX_TOP_K = 16  # the kernel finds one maximum after the other
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def route(
    scores_TE: Tensor, forced_TK: Tensor, *, norm_topk_prob: bool, dtype: torch.dtype, fused: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Routes (T, K) int64 and their weights (T, K) in `dtype`, which carry the gradient to the scores.

    A weight is the softmax over all experts, in float32, of the score of one of the top K, divided by the sum of the K
    with `norm_topk_prob`. The scores of `forced_TK` (T, K) are raised above all others for the choice alone. The order
    of a token's routes is left open. `fused` asks for the one kernel or for torch; by default the kernel runs on CUDA,
    where Triton is installed and for up to 16 of up to 1024 experts.
    """
    if fused is None:
        fused = _is_fusible(scores_TE, forced_TK.shape[1])
    if fused and torch.compiler.is_compiling():
        from bexp.kernels import router_operators  # noqa: PLC0415 - needs Triton

        chosen, shares, _ = router_operators.route(scores_TE, forced_TK, norm_topk_prob, dtype)
        return chosen, shares
    if fused:
        routes, weights = _Route.apply(scores_TE, forced_TK, norm_topk_prob, dtype)  # type: ignore[no-untyped-call]
        return routes, weights
    probabilities_TE = torch.softmax(scores_TE, dim=-1, dtype=torch.float32)
    raised_TE = scores_TE.detach().scatter(1, forced_TK, float("inf"))
    routes_TK = torch.topk(raised_TE, forced_TK.shape[1], dim=-1, sorted=False).indices
    weights_TK = probabilities_TE.gather(1, routes_TK)
    if norm_topk_prob:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return routes_TK, weights_TK.to(dtype)


def score(h_TD: Tensor, w_router: Tensor) -> tuple[Tensor, Tensor]:
    """The router's scores (T, E) for hidden states (T, D) and its matrix (E, D), and the hidden states again.

    What the experts take must be the second result: its gradient is then added to the router's within the product that
    makes the latter, and not in one more pass over memory. Within torch.compile the compiler sees to it.
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
            # In place: experts make a gradient of their own. What only passes another's on is a view or expanded.
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


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator] # torch's decorator has no types
def _has_kernel(device: torch.device) -> bool:
    return triton_reason(device) is None


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
