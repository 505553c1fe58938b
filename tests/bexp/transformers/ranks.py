"""Two processes that train a model that is set up, and write the worst difference to the plain gradients."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import bexp
from bexp.transformers.layers import decoder_layers
from tests.bexp.trainer.recommendations import document
from tests.bexp.transformers import models
from tests.forked_ranks import SHARDING, fork_ranks

NUM_RANKS = 2
WRAPPERS = ("ddp", "fully_shard")


def run(folder: Path, rank: int) -> None:
    """Compare gradients as one of the ranks."""
    store = FileStore(str(folder / "store"), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    halves = {key: value[2 * rank : 2 * rank + 2] for key, value in models.batch().items()}
    plain = models.tiny("olmoe")
    plain(**halves).loss.backward()
    wanted = {}
    for name, parameter in plain.named_parameters():
        dist.all_reduce(parameter.grad)
        wanted[name] = parameter.grad / NUM_RANKS
    found = {}
    for wrap in WRAPPERS:
        model = models.tiny("olmoe")
        bexp.apply(model, document())
        wrapped = DistributedDataParallel(model) if wrap == "ddp" else sharded(model)
        wrapped(**halves).loss.backward()
        found[wrap] = max(
            float((whole(p.grad) - wanted[name]).norm() / wanted[name].norm().clamp(min=1e-12))
            for name, p in model.named_parameters()
        )
        assert bexp.restore(wrapped)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def sharded(model: Any) -> Any:
    """The model with its parameters spread over the ranks."""
    from torch.distributed.fsdp import fully_shard  # takes seconds, in each process that collects tests

    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(gradient: Any) -> torch.Tensor:
    """All of a gradient that may be sharded."""
    found: torch.Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return found


if __name__ == "__main__":
    sys.exit(fork_ranks(partial(run, Path(sys.argv[1])), NUM_RANKS, shared=SHARDING))
