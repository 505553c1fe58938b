"""Cross entropy of next tokens that includes the projection to the vocabulary and works chunk by chunk.

It does what `loss.chunked_cross_entropy` does, and more: some targets are ignored, the caller may give the number that
the sum is divided by, and the logits may be scaled or capped before the softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from bexp.kernels.loss import float32_log_softmax

CHUNK_TOKENS = 4096
_MOST_BYTES = 1 << 30

Pointwise = Callable[[Tensor], Tensor]


def chunk_tokens(vocab_size: int) -> int:
    """Return the tokens of a chunk: as many as 1 GiB of float32 logits holds, but 256 to `CHUNK_TOKENS`."""
    return max(256, min(CHUNK_TOKENS, _MOST_BYTES // (4 * vocab_size)))


def causal_cross_entropy(
    h_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    *,
    transform: Pointwise | None = None,
    ignore_index: int = -100,
    chunk: int | None = None,
) -> Tensor:
    """Return the sum, in float32, of the cross entropies of all targets that are not `ignore_index`.

    The pointwise function `transform` is applied to the logits. The gradients are computed together with the loss and
    kept until backward: (T, D) in the dtype of h for h, and in float32 for the weight if there are several chunks or it
    is in float16.
    """
    size = chunk or chunk_tokens(weight_VD.shape[0])
    loss: Tensor = _CausalCrossEntropy.apply(  # type: ignore[no-untyped-call]  # untyped in torch
        h_TD, weight_VD, bias_V, targets_T, transform, ignore_index, size, torch.is_grad_enabled()
    )
    return loss


class _CausalCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        h_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        transform: Pointwise | None,
        ignore_index: int,
        chunk: int,
        with_gradients: bool,
    ) -> Tensor:
        needs = tuple(with_gradients and needed for needed in ctx.needs_input_grad[:3])
        num_tokens = h_TD.shape[0]
        # A sum over tokens can exceed float16's largest number, 65504, although the mean does not.
        is_wide = weight_VD.dtype is torch.float16 or (num_tokens > chunk and weight_VD.dtype.itemsize < 4)
        wide = torch.float32 if is_wide else weight_VD.dtype
        grad_h = torch.empty_like(h_TD) if needs[0] else None
        grad_weight = torch.zeros_like(weight_VD, dtype=wide) if needs[1] else None
        grad_bias = torch.zeros_like(bias_V, dtype=torch.float32) if bias_V is not None and needs[2] else None
        total = torch.zeros((), dtype=torch.float32, device=h_TD.device)
        for start in range(0, num_tokens, chunk):
            part = slice(start, min(num_tokens, start + chunk))
            logits = F.linear(h_TD[part], weight_VD, bias_V)
            losses, grad_logits = _losses(logits, targets_T[part], transform, ignore_index, gradient=any(needs))
            del logits  # before those of the next chunk are made
            total += losses
            if grad_logits is None:
                continue
            if grad_h is not None:
                torch.mm(grad_logits, weight_VD, out=grad_h[part])
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits, h_TD[part])
            if grad_bias is not None:
                grad_bias += grad_logits.sum(dim=0, dtype=torch.float32)
            del grad_logits
        ctx.gradients = (grad_h, grad_weight, grad_bias)
        ctx.dtypes = (weight_VD.dtype, None if bias_V is None else bias_V.dtype)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("backward ran twice through the chunked loss, which keeps its gradients only for one")
        grad_h, grad_weight, grad_bias = ctx.gradients
        ctx.gradients = None
        for gradient in (grad_h, grad_weight, grad_bias):
            if gradient is not None:
                gradient.mul_(grad)
        weight_dtype, bias_dtype = ctx.dtypes
        weight = None if grad_weight is None else grad_weight.to(weight_dtype)
        return grad_h, weight, None if grad_bias is None else grad_bias.to(bias_dtype), *(None,) * 5


def _losses(
    logits: Tensor, targets: Tensor, transform: Pointwise | None, ignore_index: int, *, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Return a chunk's summed loss and the gradient of its logits in their dtype; overwrites the logits if possible."""
    leaf = logits
    scores = logits
    if transform is not None:
        leaf = logits.detach().requires_grad_(gradient)
        with torch.set_grad_enabled(gradient):
            scores = transform(leaf)
    kept = targets != ignore_index
    index = torch.where(kept, targets, 0).unsqueeze(1)
    values = scores.detach()
    log_probabilities = float32_log_softmax(values if transform is None else values.to(torch.float32, copy=True))
    total = -(log_probabilities.gather(1, index).squeeze(1) * kept).sum()
    if not gradient:
        return total, None
    probabilities = log_probabilities.exp_()  # d(loss)/d(scores) = softmax - one_hot, or 0 for an ignored target
    probabilities.scatter_add_(1, index, probabilities.new_full((1, 1), -1.0).expand_as(index))
    probabilities.mul_(kept.unsqueeze(1))
    if transform is None:
        return total, logits.copy_(probabilities)
    (grad,) = torch.autograd.grad(scores, leaf, probabilities.to(scores.dtype))
    return total, grad


def _add_product(total: Tensor, grad_logits: Tensor, h: Tensor) -> None:
    """Compute total (V, D) += grad_logits^T (V, T) h (T, D), summed in float32 if `total` is wider than the factors."""
    if total.dtype is h.dtype:
        total.addmm_(grad_logits.t(), h)
    elif h.device.type == "cuda":
        torch.addmm(total, grad_logits.t(), h, out_dtype=total.dtype, out=total)
    else:
        total += torch.mm(grad_logits.t().to(total.dtype), h.to(total.dtype))
