"""Cross entropy over a vocabulary, with the projection to it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def full_cross_entropy(h_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_T: Tensor) -> Tensor:
    """Return the mean cross entropy. All logits (T, V) are in memory, in float32, as in a plain call."""
    return F.cross_entropy(F.linear(h_TD, weight_VD, bias_V).float(), targets_T)


def chunked_cross_entropy(
    h_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_T: Tensor, chunk_tokens: int
) -> Tensor:
    """Return the same mean, with only the logits of `chunk_tokens` tokens in memory at a time.

    If gradients are enabled, each chunk's gradients are computed while its logits exist, and kept until backward:
    (T, D) for the hidden states, and one accumulated gradient of the projection. Backward only scales them. Liger
    Kernel's fused linear cross entropy works in the same way (Hsu et al., 2024, arXiv:2410.10989). If gradients are
    disabled, only the loss is computed.
    """
    loss: Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]  # untyped in torch
        h_TD, weight_VD, bias_V, targets_T, chunk_tokens, torch.is_grad_enabled()
    )
    return loss


def float32_log_softmax(logits: Tensor) -> Tensor:
    """Return the logarithm of the softmax over the last dimension in float32; logits in float32 are overwritten.

    The result takes the memory of the logits' copy in float32. torch.log_softmax with a dtype holds both at once.
    """
    wide = logits.float()
    return torch.log_softmax(wide, dim=-1, out=wide)


class _ChunkedCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        h_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        chunk_tokens: int,
        with_gradients: bool,
    ) -> Tensor:
        num_tokens = h_TD.shape[0]
        needs = tuple(with_gradients and needed for needed in ctx.needs_input_grad[:3])
        grad_h = torch.empty_like(h_TD) if needs[0] else None
        grad_weight = torch.zeros_like(weight_VD) if needs[1] else None
        grad_bias = torch.zeros_like(bias_V, dtype=torch.float32) if bias_V is not None and needs[2] else None
        # The sum over tokens can exceed float16's largest number, 65504, although the mean does not. A power of two
        # near the root of the number of tokens leaves as much room above as below.
        shrink = 2.0 ** -(num_tokens.bit_length() // 2) if weight_VD.dtype is torch.float16 else 1.0
        total = torch.zeros((), dtype=torch.float32, device=h_TD.device)
        for start in range(0, num_tokens, chunk_tokens):
            chunk = slice(start, min(num_tokens, start + chunk_tokens))
            h, targets = h_TD[chunk], targets_T[chunk].unsqueeze(1)
            logits = F.linear(h, weight_VD, bias_V)
            log_probabilities = float32_log_softmax(logits)
            total -= log_probabilities.gather(1, targets).sum()
            if not any(needs):
                del logits, log_probabilities
                continue
            # d(sum of losses)/d(logits) = softmax - one_hot; the mean is taken in backward, so that half precision
            # does not have to hold numbers as small as 1 / T.
            probabilities = log_probabilities.exp_()
            probabilities.scatter_add_(1, targets, probabilities.new_full((1, 1), -1.0).expand_as(targets))
            grad_logits = logits.copy_(probabilities)
            if grad_h is not None:
                torch.mm(grad_logits, weight_VD, out=grad_h[chunk])
            if grad_weight is not None:
                grad_weight.addmm_(grad_logits.t(), h, alpha=shrink)
            if grad_bias is not None:
                grad_bias += probabilities.sum(dim=0)
            del logits, grad_logits, log_probabilities, probabilities  # before those of the next chunk are made
        ctx.num_tokens, ctx.shrink = num_tokens, shrink
        ctx.gradients = (grad_h, grad_weight, None if grad_bias is None or bias_V is None else grad_bias)
        ctx.bias_dtype = None if bias_V is None else bias_V.dtype
        return total / num_tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        if ctx.gradients is None:
            raise RuntimeError("backward ran twice through the chunked loss, which keeps its gradients only for one")
        grad_h, grad_weight, grad_bias = ctx.gradients
        ctx.gradients = None
        scale = grad / ctx.num_tokens
        for gradient, of in ((grad_h, scale), (grad_weight, scale / ctx.shrink), (grad_bias, scale)):
            if gradient is not None:
                gradient.mul_(of)
        return grad_h, grad_weight, None if grad_bias is None else grad_bias.to(ctx.bias_dtype), None, None, None
