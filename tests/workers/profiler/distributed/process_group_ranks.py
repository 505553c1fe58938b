"""Four ranks that make groups as processes on the CPU, and write into a folder what each of them found."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from bexp.explorer.model.training import Sharding
from bexp.workers.instruments.failures import UnsupportedTrialError
from bexp.workers.instruments.rank_group import RankGroup
from bexp.workers.profiler.distributed.process_groups import ProcessGroups
from bexp.workers.training.fully_sharded import FullySharded
from bexp.workers.training.optimizer import own
from tests.forked_ranks import fork_ranks
from tests.workers.profiler.samples import candidate, components_of, plan

NUM_RANKS = 4


def run(folder: Path, rank: int) -> None:
    """Make the groups of three trials, and use them."""
    torch.set_num_threads(1)
    groups = ProcessGroups(FileStore(str(folder / "store"), NUM_RANKS), rank, NUM_RANKS, torch.device("cpu"))
    rings = candidate(layout="ring", size=2)
    pairs = plan(rings, components_of(rings)[1:2], num_processes=4)
    three, eight = plan(candidate(), num_processes=3), plan(candidate(), num_processes=8)
    for each in (pairs, three, eight, pairs):
        groups.prepare(each)
    ranks = groups.rank_group(pairs)
    context = ranks.context_parallel(2, "striped")
    assert ranks.members is not None
    total = torch.full((3,), float(rank))
    dist.all_reduce(total, group=ranks.members)
    found = {
        "largest": ranks.all_reduce_max(float(rank), -float(rank)),
        "total": total.tolist(),
        "ring": context.gather(torch.tensor([[rank]])).tolist(),
        "part": [groups.takes_part(each) for each in (pairs, three)],
    }
    if groups.takes_part(three):
        found["three"] = groups.rank_group(three).all_reduce_max(float(rank))
        found["gradient"] = mean_gradient(groups.rank_group(three))
    try:
        groups.rank_group(eight)
    except UnsupportedTrialError as error:
        found["eight"] = str(error)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def mean_gradient(ranks: RankGroup) -> list[float]:
    """This rank's share of the gradient of a column of weights, which on each rank is the rank's number."""
    assert ranks.members is not None
    sharded = FullySharded(ranks.members, torch.device("cpu"), Sharding.ZERO3, None)
    linear = torch.nn.Linear(1, ranks.size, bias=False)
    wrapped = sharded.wrap(linear)
    with sharded.micro_step(is_last=True):
        wrapped(torch.full((1, 1), float(ranks.rank))).sum().backward()
    assert linear.weight.grad is not None
    return own(linear.weight.grad).flatten().tolist()


if __name__ == "__main__":
    sys.exit(fork_ranks(partial(run, Path(sys.argv[1])), NUM_RANKS))
