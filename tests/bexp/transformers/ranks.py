"""A model that is set up, trained on two processes; run by torch.multiprocessing."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import bexp
from bexp.transformers.layers import decoder_layers
from tests.bexp.recommendations import document
from tests.bexp.transformers import models


def train(rank: int, port: int, answers: Any) -> None:
    """Put the worst difference to the plain gradients, for each way to wrap a model, into `answers`."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        halves = {key: value[2 * rank : 2 * rank + 2] for key, value in models.batch().items()}
        plain = models.tiny("olmoe")
        plain(**halves).loss.backward()
        wanted = {}
        for name, parameter in plain.named_parameters():
            dist.all_reduce(parameter.grad)
            wanted[name] = parameter.grad / 2
        for wrap in ("ddp", "fully_shard"):
            model = models.tiny("olmoe")
            bexp.apply(model, document())
            wrapped = DistributedDataParallel(model) if wrap == "ddp" else _sharded(model)
            wrapped(**halves).loss.backward()
            answers[rank, wrap] = max(
                float((_whole(p.grad) - wanted[name]).norm() / wanted[name].norm().clamp(min=1e-12))
                for name, p in model.named_parameters()
            )
            assert bexp.restore(wrapped)
    finally:
        dist.destroy_process_group()


def _sharded(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _whole(gradient: Any) -> torch.Tensor:
    found: torch.Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return found
