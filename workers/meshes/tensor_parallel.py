"""Blocks that several ranks share, with tensor and sequence parallelism.

Each rank has the blocks of one device of a mesh (`bexp.explorer.meshes.shards`), which are also timed alone.
Between blocks a rank has 1 / size of a micro-batch's tokens. A block gathers all tokens behind its norm. Its partial
results are summed and scattered (Korthikanti et al., 2022, arXiv:2205.05198). Embedding and head have a part of the
vocabulary each (Shoeybi et al., 2019, arXiv:1909.08053).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from bexp.explorer.model.model import ModelSpec
from bexp.workers.targets.reference.attention_block import AttentionBlock
from bexp.workers.targets.reference.block import ResidualBlock
from bexp.workers.targets.reference.ffn_block import MLP, DenseFFN, MoEFFN
from bexp.workers.targets.reference.head import Embedding, Head
from bexp.workers.targets.reference.norm import norm_over_ranks
from bexp.workers.training.collectives import all_gather, reduce_scatter

WHOLE = ("weight", "bias", "w_router", "w_shared_gate", "w_positions")
"""Names of parameters that every rank has whole: norms, biases after a sum, routers, learned positions."""


class SequenceParallel:
    """The ranks of a group, each of which has a part of a micro-batch's tokens (B, S) between blocks.

    Tokens are counted row by row. Rank r of N has those from r * B * S / N on, with the shape (B, S / N, D). Its rows
    are those of the micro-batch only if B is 1. Operations between blocks treat each token alike.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size, self.rank = group.size(), group.rank()

    def gather(self, x_BSD: Tensor) -> Tensor:
        """Return all tokens; the gradients are summed and scattered."""
        out: Tensor = _CollectiveFunction.apply(x_BSD, self.gathered, self.reduced)  # type: ignore[no-untyped-call]  # untyped in torch
        return out

    def reduce(self, x_BSD: Tensor) -> Tensor:
        """Return this rank's tokens, summed over the ranks; the gradients are gathered."""
        out: Tensor = _CollectiveFunction.apply(x_BSD, self.reduced, self.gathered)  # type: ignore[no-untyped-call]  # untyped in torch
        return out

    def gathered(self, x_BSD: Tensor) -> Tensor:
        """Gather without a graph, straight to its place."""
        rows, length, width = x_BSD.shape
        out_BSD = x_BSD.new_empty((rows, self.size * length, width))
        all_gather(out_BSD.view(-1, width), x_BSD.reshape(-1, width), group=self.group)
        return out_BSD

    def reduced(self, x_BSD: Tensor) -> Tensor:
        """Sum and scatter without a graph, straight from its place."""
        rows, length, width = x_BSD.shape
        out_BSD = x_BSD.new_empty((rows, length // self.size, width))
        reduce_scatter(out_BSD.view(-1, width), x_BSD.reshape(-1, width), group=self.group)
        return out_BSD

    def total(self, own: Tensor) -> Tensor:
        """Return the sum over the ranks, without a graph. Gathering few numbers is faster than reducing them."""
        each = own.new_empty((self.size, *own.shape))
        all_gather(each.view(-1), own.contiguous().view(-1), group=self.group)
        return each.sum(dim=0)


class TensorParallel(SequenceParallel):
    """The ranks that share the blocks of a device mesh's stage, seen from one of them."""

    def __init__(self, group: dist.ProcessGroup, model: ModelSpec) -> None:
        """Take the whole model as `model`."""
        super().__init__(group)
        self._vocab_size = model.vocab_size
        self._share = -(-model.vocab_size // self.size)

    def spread(self, block: ResidualBlock) -> None:
        """Make a block take and return this rank's tokens. Experts that other ranks share do so already."""
        assert block.bta_tile is None, "a tile of rows would be of several sequences"
        if isinstance(block, MoEFFN) and block.is_spread:
            if isinstance(block.shared, MLP):
                block.shared = _SharedExperts(block.shared, self)
            return
        block.norm = _Gathered(block.norm, self)
        owner: AttentionBlock | MLP | None = None
        if isinstance(block, AttentionBlock):
            owner = block
            if block.q_norm is not None and not block.norm_heads:
                block.norm_over_ranks = partial(norm_over_ranks, size=self.size, total=self.total)
        elif isinstance(block, DenseFFN):
            owner = block.mlp
        elif isinstance(block, MoEFFN) and isinstance(block.shared, MLP) and block.shared.b_out is not None:
            block.shared = _PartOfBias(block.shared, self.size)  # a gate may come before the sum
        bias: nn.Parameter | None = None
        if owner is not None:
            bias, owner.b_out = owner.b_out, None
        block.reduce = _Reduced(self, bias)

    def embed(self, embedding: Embedding) -> nn.Module:
        """Return an embedding of this rank's part of the vocabulary, for all tokens."""
        return VocabularyEmbedding(embedding, self.vocabulary, self)

    def spread_loss(self, head: Head) -> None:
        """Make a head with this rank's part of the vocabulary return the loss of all tokens."""
        head.norm = _Gathered(head.norm, self)
        first, end = self.vocabulary
        head.shared_loss = partial(_vocabulary_loss, head, first=first, end=end, group=self.group)

    @property
    def vocabulary(self) -> tuple[int, int]:
        """The first token of this rank, and the end; the last rank may have fewer tokens than others, and padding."""
        first = min(self._vocab_size, self.rank * self._share)
        return first, min(self._vocab_size, first + self._share)

    def sum_gradients(self, module: nn.Module, gradients: dict[nn.Parameter, Tensor]) -> None:
        """Sum the gradients of whole parameters, of which each rank has those of its heads or its tokens."""
        present = [gradients[parameter] for parameter in whole_parameters(module) if parameter in gradients]
        if not present:
            return
        flat = torch._utils._flatten_dense_tensors(present)
        dist.all_reduce(flat, group=self.group)
        torch._foreach_copy_(present, list(torch._utils._unflatten_dense_tensors(flat, present)))


def spread_loss_alone(head: Head) -> None:
    """Make a head with a part of the vocabulary run its code for several ranks, without the exchange.

    A rank's head is timed by itself in this way. Targets are tokens of this part.
    """
    head.shared_loss = partial(_vocabulary_loss, head, first=0, end=head.w_vocab.shape[0], group=None)


def _vocabulary_loss(
    head: Head,
    h_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    *,
    first: int,
    end: int,
    group: dist.ProcessGroup | None,
) -> Tensor:
    size = head.loss.chunk_tokens if head.loss.kind == "chunked" else h_TD.shape[0]
    loss: Tensor = _VocabularyLoss.apply(  # type: ignore[no-untyped-call]  # untyped in torch
        h_TD, weight_VD, bias_V, targets_T - first, end - first, size, group
    )
    return loss


def whole_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that every rank has whole: those of `WHOLE`, except norms that span all ranks' heads."""
    blocks = [each for each in module.modules() if isinstance(each, AttentionBlock) and each.norm_over_ranks]
    parts = {norm.weight for block in blocks for norm in (block.q_norm, block.k_norm) if norm is not None}
    for name, parameter in module.named_parameters():
        if name.rsplit(".", 1)[-1] in WHOLE and parameter not in parts:
            yield parameter


class _Gathered(nn.Module):
    """A norm of this rank's tokens, and then all of them."""

    def __init__(self, norm: nn.Module, ranks: SequenceParallel) -> None:
        super().__init__()
        self.norm, self._ranks = norm, ranks

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self._ranks.gather(self.norm(x_BSD))


class _Reduced(nn.Module):
    """The sum of partial results; the bias is added to it once."""

    def __init__(self, ranks: SequenceParallel, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.bias, self._ranks = bias, ranks

    def forward(self, x_BSD: Tensor) -> Tensor:
        out = self._ranks.reduce(x_BSD)
        return out if self.bias is None else out + self.bias


class _PartOfBias(nn.Module):
    """Shared experts of which each rank has a part, with 1 / size of their bias, which is whole in the ranks' sum."""

    def __init__(self, mlp: MLP, size: int) -> None:
        super().__init__()
        bias, mlp.b_out = mlp.b_out, None
        assert bias is not None
        self.mlp, self.bias, self._size = mlp, bias, size

    def forward(self, h_TD: Tensor) -> Tensor:
        return torch.add(self.mlp(h_TD), self.bias, alpha=1.0 / self._size)


class _SharedExperts(nn.Module):
    """Shared experts of which each rank has a part, for the tokens (T, D) of all ranks."""

    def __init__(self, mlp: MLP, ranks: SequenceParallel) -> None:
        super().__init__()
        bias, mlp.b_out = mlp.b_out, None
        self.mlp, self.reduce, self._ranks = mlp, _Reduced(ranks, bias), ranks

    def forward(self, h_TD: Tensor) -> Tensor:
        out: Tensor = self.reduce(self.mlp(self._ranks.gather(h_TD.unsqueeze(0))))
        return out.squeeze(0)


class VocabularyEmbedding(nn.Module):
    """An embedding of tokens `first` to `end`, which is zero for all others. `ranks` have the other tokens.

    Without `ranks` the embedding runs the same code for all tokens, without the exchange, so that a rank's embedding
    can be timed by itself.
    """

    def __init__(self, embedding: Embedding, vocabulary: tuple[int, int], ranks: SequenceParallel | None) -> None:
        super().__init__()
        self.w_tokens, self.w_positions = embedding.w_tokens, embedding.w_positions
        self._vocabulary, self._ranks = vocabulary, ranks

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Look this rank's tokens up, and return its part of the sum over the ranks."""
        first, end = self._vocabulary
        is_own_BS = (tokens_BS >= first) & (tokens_BS < end)
        x_BSD = F.embedding(torch.where(is_own_BS, tokens_BS - first, 0), self.w_tokens)
        x_BSD = x_BSD * is_own_BS.unsqueeze(-1)
        if self._ranks is not None:
            x_BSD = self._ranks.reduce(x_BSD)
        if self.w_positions is None:
            return x_BSD
        length, number = tokens_BS.shape[1], x_BSD.shape[0] * x_BSD.shape[1]
        begin = 0 if self._ranks is None else self._ranks.rank * number % length
        times = -(-(begin + number) // length)
        positions_TD = self.w_positions[:length].repeat(times, 1)[begin : begin + number]
        return x_BSD + positions_TD.view_as(x_BSD)


class _CollectiveFunction(Function):
    """A collective whose gradients go `back`. Neither direction makes a graph."""

    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x_BSD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grad), None, None


class _VocabularyLoss(Function):
    """The mean cross entropy of logits whose vocabulary is spread over ranks, chunk by chunk of the tokens.

    Gradients are computed and scaled as in `bexp.kernels.loss`; those of the hidden states are this rank's part of a
    sum. `targets_T` count from this rank's first token, so targets of other ranks are negative or too large. Logits
    from `num_valid` on are padding.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        num_valid: int,
        chunk_tokens: int,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        grad_h, grad_weight = torch.empty_like(h_TD), torch.zeros_like(weight_VD)
        grad_bias = None if bias_V is None else torch.zeros_like(bias_V, dtype=torch.float32)
        total = torch.zeros((), dtype=torch.float32, device=h_TD.device)
        for start in range(0, h_TD.shape[0], chunk_tokens):
            part = slice(start, start + chunk_tokens)
            logits = F.linear(h_TD[part], weight_VD, bias_V)
            total += _shared_losses(logits, targets_T[part], num_valid, group)
            torch.mm(logits, weight_VD, out=grad_h[part])
            grad_weight.addmm_(logits.t(), h_TD[part])
            if grad_bias is not None:
                grad_bias += logits.sum(dim=0, dtype=torch.float32)
            del logits
        ctx.num_tokens, ctx.dtype = h_TD.shape[0], None if bias_V is None else bias_V.dtype
        ctx.gradients = (grad_h, grad_weight, grad_bias)
        return total / h_TD.shape[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_h, grad_weight, grad_bias = ctx.gradients
        ctx.gradients = None
        scale = grad / ctx.num_tokens
        for gradient in (grad_h, grad_weight, grad_bias):
            if gradient is not None:
                gradient.mul_(scale)
        return grad_h, grad_weight, None if grad_bias is None else grad_bias.to(ctx.dtype), *(None,) * 4


def _shared_losses(logits_TV: Tensor, targets_T: Tensor, num_valid: int, group: dist.ProcessGroup | None) -> Tensor:
    """Return a chunk's summed loss over all ranks' vocabularies, and replace this rank's logits by their gradient.

    Ranks exchange two numbers for each token: the logarithm of the sum of their exponentials, and the target's logit,
    which one of them has. In addition to the logits one float32 tensor of their shape is alive, and is rounded once.
    """
    if num_valid < logits_TV.shape[1]:
        logits_TV[:, num_valid:] = torch.finfo(logits_TV.dtype).min
    is_own_T = (targets_T >= 0) & (targets_T < num_valid)
    index_T1 = torch.where(is_own_T, targets_T, 0).unsqueeze(1)
    own_scores_T = logits_TV.gather(1, index_T1).squeeze(1).float().masked_fill_(~is_own_T, 0.0)
    highest_T1 = logits_TV.amax(dim=1, keepdim=True).float()
    exponentials_TV = torch.sub(logits_TV, highest_T1).exp_()
    sums_T = exponentials_TV.sum(dim=1).log_().add_(highest_T1.squeeze(1))
    all_T, scores_T = sums_T, own_scores_T
    if group is not None:
        own_2T = torch.stack((sums_T, own_scores_T))
        each_N2T = own_2T.new_empty((group.size(), *own_2T.shape))
        all_gather(each_N2T.view(-1), own_2T.view(-1), group=group)
        all_T, scores_T = each_N2T[:, 0].logsumexp(dim=0), each_N2T[:, 1].sum(dim=0)
    share_T1 = highest_T1.sub_(all_T.unsqueeze(1)).exp_()
    torch.mul(exponentials_TV, share_T1, out=logits_TV)
    at_target_T1 = exponentials_TV.gather(1, index_T1).mul_(share_T1) - is_own_T.unsqueeze(1).float()
    logits_TV.scatter_(1, index_T1, at_target_T1.to(logits_TV.dtype))
    return (all_T - scores_T).sum()
