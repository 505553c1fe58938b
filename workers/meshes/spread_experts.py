"""Expert blocks of one of the ranks that share the experts of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from bexp.explorer.cost.components import Component
from bexp.explorer.model.model import ModelSpec
from bexp.explorer.request.request import ExplorationRequest
from bexp.kernels.expert_parallel.experts import ExpertParallel
from bexp.kernels.expert_parallel.peers import GroupPeers, Peers, Splits
from bexp.kernels.experts.registry import expert_backend
from bexp.workers.targets.reference.ffn_block import MoEFFN
from bexp.workers.targets.reference.weights import Weights, device_routes


def build_spread_experts(
    peers: Peers,
    model: ModelSpec,
    component: Component,
    request: ExplorationRequest,
    device: torch.device,
    generator: torch.Generator | None,
) -> MoEFFN:
    """Return a block with this rank's experts and the router of all; its routes are not set yet.

    The component says how many ranks share the experts of `model`, and in how many chunks they exchange tokens. It also
    says how many of the most popular experts each rank copies.
    """
    moe = model.moe
    assert moe is not None, "a model with experts"
    assert component.experts is not None, "an expert component names its back end"
    training = request.mode == "train"
    local = moe.model_copy(update={"num_experts": moe.num_experts // component.expert_parallel_size})
    block = MoEFFN(
        model.model_copy(update={"moe": local}),
        backend=component.experts,
        recompute=component.recompute,
        device=device,
        training=training,
        generator=generator,
    )
    run = _expert_parallel(peers, model, component, request, device)
    block.spread(run, Weights.of(model, device, training, generator).normal(moe.num_experts, model.hidden_size))
    return block


def _expert_parallel(
    peers: Peers, model: ModelSpec, component: Component, request: ExplorationRequest, device: torch.device
) -> ExpertParallel:
    assert model.moe is not None, "a model with experts"
    assert component.experts is not None, "an expert component names its back end"
    number, shadowed = component.shadowed_experts, ()
    if number:
        counts = _counts(model, _routes(model, component, request, device))
        shadowed = tuple(sorted(counts.topk(number).indices.tolist()))
    return ExpertParallel(
        peers,
        model.moe.num_experts,
        expert_backend(component.experts).forward,
        overlap_degree=component.overlap_degree,
        shadowed_experts=shadowed,
        capacity_of=None if model.moe.capacity_factor is None else model.moe.capacity,
    )


def build_busiest_rank(
    model: ModelSpec,
    component: Component,
    request: ExplorationRequest,
    device: torch.device,
    generator: torch.Generator | None,
    group: dist.ProcessGroup | None = None,
) -> tuple[MoEFFN, LocalPeers]:
    """Return the block of the rank that gets the most pairs of token and expert, with the other ranks imitated.

    Within the context of its `waiting` the block exchanges tokens with the ranks of `group`, if there is one, as in
    training.
    """
    routes_TK = _routes(model, component, request, device)
    counts_E = _counts(model, routes_TK)
    if component.shadowed_experts:
        counts_E[counts_E.topk(component.shadowed_experts).indices] = 0
    if drops := model.moe is not None and model.moe.capacity_factor is not None:
        counts_E.clamp_(max=model.moe.capacity(routes_TK.shape[0]))
    size = component.expert_parallel_size
    peers = LocalPeers(size, int(counts_E.view(size, -1).sum(dim=1).argmax()))
    block = build_spread_experts(peers, model, component, request, device, generator)
    block.set_routes(routes_TK)
    block.is_repeatable = not drops  # other inputs drop other pairs, so that the known numbers of rows change
    if group is not None:
        run = _expert_parallel(GroupPeers(group), model, component, request, device)
        block.waiting = partial(_experts_run_by, block, run)
    return block, peers


@contextmanager
def _experts_run_by(block: MoEFFN, run: ExpertParallel) -> Iterator[None]:
    alone, block.run_experts = block.run_experts, run
    try:
        yield
    finally:
        block.run_experts = alone


def _routes(model: ModelSpec, component: Component, request: ExplorationRequest, device: torch.device) -> Tensor:
    tokens = component.micro_batch_size * model.seq_length
    return device_routes(model, request.routing, tokens, request.seed, device)


def _counts(model: ModelSpec, routes_TK: Tensor) -> Tensor:
    assert model.moe is not None, "a model with experts"
    return torch.bincount(routes_TK.flatten(), minlength=model.moe.num_experts)


class LocalPeers:
    """One of `size` ranks that have equal routes, without the others: exchanges are copies on its own device.

    Rows from another rank are replaced by those that this rank sends to itself. So its experts get as many rows, with
    the same routes, as in a group whose ranks have such tokens. A copy takes a fraction of an exchange's time, which
    `bexp.explorer.meshes.layers` subtracts.
    """

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank
        self._known: list[int] | None = None
        self._drawn: dict[tuple[int, ...], Tensor] = {}

    def all_to_all(self, buffer: Tensor, tensor: Tensor, splits: Splits) -> None:
        """Fill the buffer with the rows that this rank sends to itself; on the way back, with those for any rank."""
        own = splits.sent[self.rank]
        if all(number == own for number in splits.received):
            first = sum(splits.sent[: self.rank])
            tensor = tensor[first : first + own]
        _fill(buffer, tensor)

    def broadcast(self, part: Tensor, owner: int) -> None:
        """Fill another rank's tensor with numbers of the size of weights."""
        if owner == self.rank:
            return
        shape = tuple(part.shape[1:])
        if shape not in self._drawn:
            self._drawn[shape] = torch.randn(shape, dtype=part.dtype, device=part.device) * 0.02
        part.copy_(self._drawn[shape])

    def reduce(self, part: Tensor, owner: int) -> None:
        """Leave the tensor as it is, because a sum adds work on the links alone."""

    def all_to_all_counts(self, sent: Tensor) -> Tensor:
        """Return this rank's counts for itself as those of every rank."""
        return sent[self.rank].expand_as(sent).contiguous()

    def read(self, counts: Tensor) -> list[int]:
        """Return the numbers, for which the host waits the first time.

        The host knows them afterwards, because routes stay the same. It then runs ahead of the device, so that the
        seconds of both can be measured.
        """
        if self._known is None:
            self._known = counts.tolist()
        return self._known


def _fill(buffer: Tensor, rows: Tensor) -> None:
    """Copy the rows into the buffer, again and again until it is full."""
    number, wanted = rows.shape[0], buffer.shape[0]
    if not number:
        buffer.zero_()
        return
    times, rest = divmod(wanted, number)
    if times:
        buffer[: times * number].view(times, *rows.shape).copy_(rows.expand(times, *rows.shape))
    if rest:
        buffer[times * number :].copy_(rows[:rest])
