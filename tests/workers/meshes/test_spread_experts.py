"""One rank of those that share experts, which plays the others."""

import pytest
import torch

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.meshes.shards import SPREAD_EXPERTS
from bexp.explorer.model.model import ModelSpec, MoESpec
from bexp.explorer.request.request import ExplorationRequest
from bexp.kernels.expert_parallel.peers import Splits
from bexp.workers.meshes.spread_experts import LocalPeers, build_busiest_rank

CPU = torch.device("cpu")
MODEL = ModelSpec(
    name="experts",
    num_layers=1,
    hidden_size=16,
    num_attention_heads=2,
    vocab_size=64,
    seq_length=64,
    moe=MoESpec(num_experts=8, top_k=2, expert_ffn_hidden_size=16),
    dtype="float32",
)


def test_counts_are_read_once() -> None:
    peers = LocalPeers(2, 0)
    assert peers.read(torch.tensor([1, 2])) == [1, 2]
    assert peers.read(torch.tensor([3, 4])) == [1, 2]


@pytest.mark.parametrize(
    ("splits", "received"),
    [
        (Splits([2, 1], [1, 1]), [2.0, 2.0]),  # there: what this rank sends to itself, as often as there are ranks
        (Splits([1, 2], [3, 2]), [0.0, 1.0, 2.0, 0.0, 1.0]),  # back: any rows, as many as there are
        (Splits([0, 0], [1, 2]), [0.0, 0.0, 0.0]),
    ],
)
def test_exchanges_fill_their_buffer(splits: Splits, received: list[float]) -> None:
    buffer = torch.full((len(received), 1), torch.nan)
    LocalPeers(2, 1).all_to_all(buffer, torch.arange(float(sum(splits.sent))).unsqueeze(1), splits)
    assert buffer.flatten().tolist() == received


@pytest.mark.parametrize(("shadowed", "busiest"), [(0, 1), (3, 0)])
def test_the_rank_that_is_measured_has_the_most_pairs(shadowed: int, busiest: int) -> None:
    """Shares make the experts 4 to 6 popular, of rank 1; without them the experts of rank 0 are."""
    shares = (5, 5, 5, 4, 20, 20, 20, 1)
    request = ExplorationRequest.model_validate({"model": MODEL, "routing": {"kind": "shares", "shares": shares}})
    component = Component(
        kind=ComponentKind.MOE_FFN,
        part=SPREAD_EXPERTS,
        backend="loop",
        micro_batch_size=8,
        expert_parallel_size=2,
        shadowed_experts=shadowed,
    )
    block, peers = build_busiest_rank(MODEL, component, request, CPU, None)
    assert peers.rank == busiest
    assert (block.w_in.shape[0], block.w_router.shape[0]) == (4, 8)
    out = block(torch.randn(8, 64, 16, requires_grad=True))
    out.sum().backward()
    assert out.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in block.parameters())


@pytest.mark.parametrize("popular", [0, 2, 3])
def test_the_rank_that_is_measured_copies_what_is_popular_before_pairs_are_dropped(popular: int) -> None:
    """Six experts are over their capacity, three of each rank, so that only their routes tell which one is copied."""
    shares = [13.0, 1.0, 13.0, 13.0, 13.0, 13.0, 4.0, 13.0]
    shares[popular] = 25.0
    assert MODEL.moe is not None
    model = MODEL.model_copy(update={"moe": MODEL.moe.model_copy(update={"capacity_factor": 0.8})})
    routing = {"kind": "shares", "shares": shares}
    request = ExplorationRequest.model_validate({"model": model, "routing": routing})
    component = Component(
        kind=ComponentKind.MOE_FFN,
        part=SPREAD_EXPERTS,
        backend="loop",
        micro_batch_size=8,
        expert_parallel_size=2,
        shadowed_experts=1,
        capacity_factor=0.8,
    )
    _, peers = build_busiest_rank(model, component, request, CPU, None)
    assert peers.rank == 1
