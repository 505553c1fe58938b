"""Two processes of a group that explore the micro-batch of their common step, and write what each of them found."""

from __future__ import annotations

import pickle
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore

import bexp
from tests.forked_ranks import fork_ranks

NUM_RANKS = 2


def explore(step: Any, **changed: Any) -> Any:
    return bexp.explore(step=step, batch=lambda size: torch.randn(size, 4), sizes=(1, 2, 4, 8), repeats=3, **changed)


def run(folder: Path, rank: int) -> None:
    """Explore where one process fails alone, then where it fails in an exchange; then use a new group."""

    def join(name: str) -> None:
        store = FileStore(str(folder / name), NUM_RANKS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)

    join("first")
    linear = nn.Linear(4, 4)
    model = nn.parallel.DistributedDataParallel(linear)

    def fail_alone(x: torch.Tensor) -> None:
        if rank == 1 and len(x) >= 4:
            raise torch.OutOfMemoryError("only here")
        model(x).square().sum().backward()

    found = explore(fail_alone, parameters=model, no_sync=model.no_sync)
    group: Any = dist.group.WORLD
    answers: dict[tuple[int, str], Any] = {}
    answers[rank, "alone"] = (found, group._get_backend(torch.device("cpu")).options._timeout)

    def fail_in_an_exchange(x: torch.Tensor) -> None:
        linear(x).sum().backward()
        dist.all_reduce(torch.ones(4))
        if rank == 1 and len(x) >= 2:
            raise RuntimeError("the middle")
        dist.all_reduce(torch.ones(4))

    begun = time.monotonic()
    found = explore(fail_in_an_exchange, parameters=linear, deadline_seconds=2.0)
    answers[rank, "exchange"] = (found, time.monotonic() - begun)
    dist.destroy_process_group()
    join("second")
    total = torch.ones(1)
    dist.all_reduce(total)
    answers[rank, "after"] = float(total)
    dist.destroy_process_group()
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(answers))


if __name__ == "__main__":
    sys.exit(fork_ranks(partial(run, Path(sys.argv[1])), NUM_RANKS))
