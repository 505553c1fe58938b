"""What one rank of a mesh has of a model: consecutive layers, whole or shared, with embedding and head at the ends."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.cost.shards import tensor_shard
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.recompute import recomputed_layers
from bexp.explorer.model.model import ModelSpec
from bexp.explorer.request.request import ExplorationRequest
from bexp.workers.targets.reference.block import ResidualBlock
from bexp.workers.targets.reference.decoder import (
    DecoderLayer,
    TakeUnit,
    layer_components,
    leave,
    share_rotary,
    share_routes,
)
from bexp.workers.targets.reference.embedding import Embedding
from bexp.workers.targets.reference.factory import build_block
from bexp.workers.targets.reference.head import Head
from bexp.workers.targets.reference.moe_block import MoEFFN
from bexp.workers.targets.reference.routes import device_routes
from bexp.workers.targets.reference.tensor_parallel import TensorParallel


class DecoderStage(nn.Module):
    """Layers `first` to `end` of `model` as a rank of a pipeline has them, with random weights.

    The first stage has the embedding and takes tokens, the last has the head and returns the loss as a tensor of one
    element; all others take and return hidden states. `ranks` share the blocks; what each of them has whole is drawn
    alike, because they have one seed. A model that ties embedding and head has one matrix if a stage has both, and
    otherwise two, whose gradients must be summed: see `tied`. `take_unit` is that of `DecoderModel`. `experts` builds
    the blocks whose experts are spread over ranks.
    """

    def __init__(
        self,
        model: ModelSpec,
        candidate: Candidate,
        request: ExplorationRequest,
        device: torch.device,
        first: int,
        end: int,
        *,
        generator: torch.Generator | None = None,
        ranks: TensorParallel | None = None,
        experts: Callable[[Component], MoEFFN] | None = None,
        take_unit: TakeUnit = leave,
    ) -> None:
        super().__init__()
        shard = tensor_shard(model, 1 if ranks is None else ranks.size)
        m = candidate.micro_batch_size

        def build(component: Component, w_tied: nn.Parameter | None = None) -> nn.Module:
            return build_block(shard, component, request, device, generator=generator, w_tied=w_tied)

        def end_of_model(kind: ComponentKind, w_tied: nn.Parameter | None = None) -> nn.Module:
            return build(Component(kind=kind, micro_batch_size=m), w_tied)

        self.embedding: nn.Module | None = None
        shares_ends = model.tie_embeddings and first == 0 and end == model.num_layers
        if first == 0:
            embedding = end_of_model(ComponentKind.EMBEDDING)
            assert isinstance(embedding, Embedding)
            w_tied = embedding.w_tokens if shares_ends else None
            self.embedding = embedding if ranks is None else ranks.embed(embedding)
            if not shares_ends:
                take_unit(self.embedding, is_last=False)
        else:
            w_tied = None
        attention, ffns = layer_components(candidate)
        recomputes = recomputed_layers(model, candidate.recompute)
        self.layers = nn.ModuleList()
        for i in range(first, end):
            block, component = build(attention), ffns[model.layer_kinds[i]]
            spreads = experts if component.kind is ComponentKind.MOE_FFN else None
            ffn = build(component) if spreads is None else spreads(component)
            assert isinstance(block, ResidualBlock)
            assert isinstance(ffn, ResidualBlock)
            if ranks is not None:
                ranks.spread(block)
                ranks.spread(ffn)
            layer = DecoderLayer(block, ffn, parallel=model.parallel_residual, recompute=recomputes[i])
            take_unit(layer, is_last=False)
            self.layers.append(layer)
        self.head: nn.Module | None = None
        if end == model.num_layers:
            head = end_of_model(ComponentKind.HEAD, w_tied)
            assert isinstance(head, Head)
            if ranks is not None:
                ranks.lose(head)
            self.head = head
            if not shares_ends:
                take_unit(head, is_last=True)
        self._has_copy = model.tie_embeddings and not shares_ends
        self.train(request.mode == "train")
        share_rotary(self)
        if model.moe is not None:
            routes_TK = device_routes(model, request.routing, m * model.seq_length, request.seed, device)
            if ranks is not None and experts is not None:  # then each rank routes its own tokens
                routes_TK = routes_TK.chunk(ranks.size)[ranks.rank]
            share_routes(self, routes_TK)

    @property
    def tied(self) -> nn.Parameter | None:
        """This stage's copy of a matrix that embedding and head share, if another stage has the other copy."""
        ends = [end for end in (self.embedding, self.head) if end is not None]
        if not self._has_copy or not ends:
            return None
        own = ends[0].w_tokens if self.head is None else ends[0].w_vocab
        assert isinstance(own, nn.Parameter)
        return own

    def forward(self, x: Tensor, targets_BS: Tensor | None = None) -> Tensor:
        """Tokens or hidden states of a micro-batch to hidden states, or to the mean cross entropy of `targets_BS`."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        if self.head is None:
            return x
        assert targets_BS is not None, "the last stage has targets"
        loss: Tensor = self.head(x, targets_BS)
        return torch.stack((loss,))  # fully_shard warns of views
