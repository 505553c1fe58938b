"""Four ranks of a company as processes on the CPU.

    python -m tests.workers.profiler.distributed.process_group_ranks FOLDER

writes there what each of them found.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from explorer.spec.training import Sharding
from tests.workers.profiler.samples import candidate, components_of, plan
from workers.profiler.distributed.process_groups import Company
from workers.profiler.failures import UnsupportedTrialError
from workers.profiler.team import Team
from workers.profiler.training.fully_sharded import FullySharded
from workers.targets.reference.optimizer import own

NUM_RANKS = 4


def run(folder: Path, rank: int) -> None:
    """Make the groups of three trials, and use them."""
    torch.set_num_threads(1)
    company = Company(FileStore(str(folder / "store"), NUM_RANKS), rank, NUM_RANKS, torch.device("cpu"))
    rings = candidate(layout="ring", size=2)
    pairs = plan(rings, components_of(rings)[1:2], num_processes=4)
    three, eight = plan(candidate(), num_processes=3), plan(candidate(), num_processes=8)
    for each in (pairs, three, eight, pairs):
        company.prepare(each)
    team = company.team(pairs)
    context = team.context_parallel(2, "striped")
    assert team.members is not None
    total = torch.full((3,), float(rank))
    dist.all_reduce(total, group=team.members)
    found = {
        "largest": team.largest(float(rank), -float(rank)),
        "total": total.tolist(),
        "ring": context.gather(torch.tensor([[rank]])).tolist(),
        "part": [company.takes_part(each) for each in (pairs, three)],
    }
    if company.takes_part(three):
        found["three"] = company.team(three).largest(float(rank))
        found["gradient"] = mean_gradient(company.team(three))
    try:
        company.team(eight)
    except UnsupportedTrialError as error:
        found["eight"] = str(error)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def mean_gradient(team: Team) -> list[float]:
    """This rank's share of the gradient of a column of weights, which on each rank is the rank's number."""
    assert team.members is not None
    sharded = FullySharded(team.members, torch.device("cpu"), Sharding.ZERO3, None)
    linear = torch.nn.Linear(1, team.size, bias=False)
    wrapped = sharded.wrap(linear)
    with sharded.micro_step(is_last=True):
        wrapped(torch.full((1, 1), float(team.rank))).sum().backward()
    assert linear.weight.grad is not None
    return own(linear.weight.grad).flatten().tolist()


if __name__ == "__main__":
    children = []
    for rank in range(1, NUM_RANKS):
        child = os.fork()
        if child == 0:
            run(Path(sys.argv[1]), rank)
            os._exit(0)
        children.append(child)
    run(Path(sys.argv[1]), 0)
    sys.exit(any(os.waitpid(child, 0)[1] for child in children))
