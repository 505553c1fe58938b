"""The part of a block that one device of a mesh has, as a module that is timed by itself."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from bexp.explorer.cost.components import Component
from bexp.explorer.meshes.shards import SPREAD_EXPERTS
from bexp.explorer.model.model import ModelSpec
from bexp.explorer.request.request import ExplorationRequest
from bexp.workers.meshes.spread_experts import build_busiest_rank
from bexp.workers.meshes.tensor_parallel import VocabularyEmbedding, spread_loss_alone
from bexp.workers.targets.reference.attention_block import AttentionBlock
from bexp.workers.targets.reference.embedding import Embedding
from bexp.workers.targets.reference.factory import build_block
from bexp.workers.targets.reference.head import Head
from bexp.workers.targets.reference.shared_norm import norm_over_ranks, total_alone


def build_shard(
    model: ModelSpec,
    component: Component,
    request: ExplorationRequest,
    device: torch.device,
    *,
    generator: torch.Generator | None = None,
    w_tied: nn.Parameter | None = None,
    group: dist.ProcessGroup | None = None,
) -> nn.Module:
    """Return the part of a block that one device runs without the others. `model` is that of `shard_of`.

    Where several devices share experts, the part is that of the busiest device. Within the context of its `waiting`, it
    is the block of this rank of `group`.
    """
    size = component.tensor_parallel_size
    if component.part == SPREAD_EXPERTS:
        experts, _ = build_busiest_rank(model, component, request, device, generator, group)
        return experts
    whole = component.model_copy(update={"tensor_parallel_size": 1, "part": None})
    block = build_block(model, whole, request, device, generator=generator, w_tied=w_tied)
    if size == 1:
        return block
    if isinstance(block, Embedding):
        return VocabularyEmbedding(block, (0, model.vocab_size), None)
    if isinstance(block, AttentionBlock) and model.qk_norm == "full":
        block.norm_over_ranks = partial(norm_over_ranks, size=size, total=total_alone)
    if isinstance(block, Head):
        spread_loss_alone(block)
    return block
