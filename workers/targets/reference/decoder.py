"""The whole model, to check the figures that are composed from its blocks."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from bexp.explorer.cost.components import Component, ComponentKind, block_recompute
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.recompute import recomputed_layers
from bexp.explorer.model.model import LayerKind, ModelSpec
from bexp.explorer.request.request import ExplorationRequest
from bexp.kernels.context_parallel.attention import ContextParallel
from bexp.kernels.recomputation import recomputed, recomputed_group
from bexp.workers.targets.reference.attention_block import AttentionBlock
from bexp.workers.targets.reference.block import ResidualBlock
from bexp.workers.targets.reference.factory import build_block
from bexp.workers.targets.reference.ffn_block import MoEFFN
from bexp.workers.targets.reference.head import Embedding, Head
from bexp.workers.targets.reference.weights import device_routes


class TakeUnit(Protocol):
    """A function that takes a part of a model that has just been built; `is_last` if forward ends with the part."""

    def __call__(self, unit: nn.Module, *, is_last: bool) -> None: ...  # noqa: D102 - its protocol says it


def leave(unit: nn.Module, *, is_last: bool) -> None:
    """Leave the part as it is."""


class DecoderLayer(nn.Module):
    """An attention block and an FFN block, one after the other or side by side; recomputed as a whole or not."""

    def __init__(self, attention: ResidualBlock, ffn: ResidualBlock, *, parallel: bool, recompute: bool) -> None:
        super().__init__()
        self.attention = attention
        self.ffn = ffn
        self.parallel = parallel
        self.recompute = recompute

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Map hidden states (B, S, D) to the same shape."""
        return recomputed(self._run, x_BSD) if self.recompute else self._run(x_BSD)

    def _run(self, x_BSD: Tensor) -> Tensor:
        if self.parallel:
            return self.attention.residual(x_BSD) + self.ffn.branch(x_BSD)
        out: Tensor = self.ffn(self.attention(x_BSD))
        return out


def layer_components(candidate: Candidate) -> tuple[Component, dict[LayerKind, Component]]:
    """Return the attention of a layer that is not recomputed as a whole, and the FFN of each kind of layer."""

    def block(kind: ComponentKind, backend: str | None, bta_tile: int | None = None) -> Component:
        spread = kind is ComponentKind.ATTENTION
        return Component(
            kind=kind,
            micro_batch_size=candidate.micro_batch_size,
            bta_tile=bta_tile,
            recompute=block_recompute(candidate.recompute, kind, bta_tile),
            backend=backend,
            context_parallel_size=candidate.context_parallel_size,
            context_parallel_layout=candidate.context_parallel_layout if spread else None,
        )

    return block(ComponentKind.ATTENTION, candidate.attention_backend, candidate.bta_tile), {
        LayerKind.DENSE: block(ComponentKind.DENSE_FFN, None),
        LayerKind.MOE: block(ComponentKind.MOE_FFN, candidate.expert_backend),
    }


class DecoderModel(nn.Module):
    """The model of `candidate` as a trainer would run it.

    The model is built of the blocks that the profiler times, by the same factory. A layer that the candidate recomputes
    keeps its input alone, and so does a group of layers that run again as one. The attention blocks share their rotary
    tables, and the expert blocks their routes, drawn as for a component. `model` is the variant of the candidate; mode,
    loss, routing, execution and seed are the request's.

    With `context_parallel`, of the candidate's size and layout, the model takes this rank's tokens of each sequence.
    Its loss is their mean, and the loss of all tokens is the mean over the ranks.

    `take_unit` gets each layer, the embedding and the head as soon as they are built, before the next one is. Embedding
    and head that are tied stay with the model.
    """

    def __init__(
        self,
        model: ModelSpec,
        candidate: Candidate,
        request: ExplorationRequest,
        device: torch.device,
        *,
        generator: torch.Generator | None = None,
        context_parallel: ContextParallel | None = None,
        take_unit: TakeUnit = leave,
    ) -> None:
        super().__init__()
        m, size = candidate.micro_batch_size, candidate.context_parallel_size
        assert (1 if context_parallel is None else context_parallel.size) == size, "as many ranks as the candidate says"
        training = request.mode == "train"

        def build(component: Component, w_tied: nn.Parameter | None = None) -> nn.Module:
            ranks = context_parallel if component.kind in {ComponentKind.EMBEDDING, ComponentKind.ATTENTION} else None
            return build_block(
                model, component, request, device, generator=generator, w_tied=w_tied, context_parallel=ranks
            )

        attention, ffns = layer_components(candidate)
        embedding = build(Component(kind=ComponentKind.EMBEDDING, micro_batch_size=m, context_parallel_size=size))
        assert isinstance(embedding, Embedding)
        self.embedding = embedding
        if not model.tie_embeddings:
            take_unit(embedding, is_last=False)
        self._group_size = candidate.recompute.group_size if training else None
        alone = training and self._group_size is None
        layers = []
        for kind, recompute in zip(model.layer_kinds, recomputed_layers(model, candidate.recompute), strict=True):
            first, second = build(attention), build(ffns[kind])
            assert isinstance(first, ResidualBlock)
            assert isinstance(second, ResidualBlock)
            layer = DecoderLayer(first, second, parallel=model.parallel_residual, recompute=recompute and alone)
            take_unit(layer, is_last=False)
            layers.append(layer)
        self.layers = nn.ModuleList(layers)
        w_tied = embedding.w_tokens if model.tie_embeddings else None
        head = build(Component(kind=ComponentKind.HEAD, micro_batch_size=m, context_parallel_size=size), w_tied)
        assert isinstance(head, Head)
        self.head = head
        if not model.tie_embeddings:
            take_unit(head, is_last=True)
        self.train(training)
        share_rotary(self)
        if model.moe is not None and device.type != "meta":
            share_routes(
                self, device_routes(model, request.routing, m * model.seq_length // size, request.seed, device)
            )

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Return the mean cross entropy of a micro-batch, a float32 scalar."""
        x_BSD = self.embedding(tokens_BS)
        if self._group_size is None:
            for layer in self.layers:
                x_BSD = layer(x_BSD)
        else:
            for start in range(0, len(self.layers), self._group_size):
                x_BSD = recomputed_group(self.layers[start : start + self._group_size], x_BSD)
        loss: Tensor = self.head(x_BSD, targets_BS)
        return loss


def share_rotary(model: nn.Module) -> None:
    """Make all attention blocks use the tables of the first."""
    blocks = [module for module in model.modules() if isinstance(module, AttentionBlock)]
    for block in blocks:
        block.rotary = blocks[0].rotary


def share_routes(model: nn.Module, routes_TK: Tensor) -> None:
    """Set the routes of all expert blocks."""
    for module in model.modules():
        if isinstance(module, MoEFFN):
            module.set_routes(routes_TK)
