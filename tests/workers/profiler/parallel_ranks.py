"""Two ranks that train together in every way there is, and write how far each is from one that has all the data."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore

from bexp.explorer.model.model import DType, ModelSpec
from bexp.explorer.model.training import OptimizerSpec, Sharding, TrainingSpec
from bexp.explorer.request.request import ExplorationRequest
from bexp.workers.instruments.kernel_shapes import torch_dtype
from bexp.workers.targets.reference.decoder import DecoderModel
from bexp.workers.targets.reference.factory import random_tokens
from bexp.workers.training.data_parallel import DataParallel, SingleProcess, data_parallel
from bexp.workers.training.optimizer import build_optimizer
from tests.forked_ranks import SHARDING, fork_ranks
from tests.workers.profiler.samples import MODEL, candidate

NUM_RANKS = 2
MICRO_STEPS = 3
STEPS = 2
CPU = torch.device("cpu")
TIED = MODEL.model_copy(update={"tie_embeddings": True})
Case = tuple[Sharding, ModelSpec, DType | None]
HALF = MODEL.model_copy(update={"dtype": DType.BFLOAT16})
CASES: list[Case] = [(sharding, model, None) for sharding in Sharding for model in (MODEL, TIED)]
CASES += [(sharding, HALF, DType.FLOAT32) for sharding in Sharding]


def name_of(case: Case) -> str:
    """Sharding, whether the ends are tied, format of the parameters."""
    sharding, model, _ = case
    return f"{sharding}-{'tied' if model.tie_embeddings else 'untied'}-{model.dtype}"


def batches(model: ModelSpec, rank: int, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    for _ in range(MICRO_STEPS):
        drawn = [random_tokens(model, (1, model.seq_length), CPU, generator) for _ in range(2)]
        yield drawn[0], drawn[1]


def train(model: ModelSpec, gradients: DType | None, parallel: DataParallel, ranks: list[int]) -> list[Tensor]:
    """The parameters after some steps on the data of `ranks`, one after another, in float32."""
    spec = OptimizerSpec(name="sgd", grad_dtype=gradients)
    request = ExplorationRequest(model=model, training=TrainingSpec(optimizer=spec))
    decoder = DecoderModel(
        model, candidate(1), request, CPU, generator=torch.Generator().manual_seed(0), take_unit=parallel.take
    )
    wrapped = parallel.wrap(decoder)
    optimizer = build_optimizer(decoder.parameters(), spec, model.dtype)
    scale = len(ranks) * MICRO_STEPS

    def exchange() -> None:
        tokens, targets = next(batches(model, 9, 9))
        with parallel.micro_step(is_last=True):
            wrapped(tokens, targets).backward()

    parallel.prepare(optimizer, exchange)
    optimizer.zero_grad()
    for step in range(STEPS):
        for rank in ranks:
            for i, (tokens, targets) in enumerate(batches(model, rank, step)):
                with parallel.micro_step(is_last=i == MICRO_STEPS - 1):
                    (wrapped(tokens, targets) / scale).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [whole(parameter).float() for parameter in decoder.parameters()]


def whole(parameter: nn.Parameter) -> Tensor:
    full = getattr(parameter.detach(), "full_tensor", None)
    return parameter.detach() if full is None else full()


def run(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(folder / "store"), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    members = dist.new_group(list(range(NUM_RANKS)))
    assert isinstance(members, dist.ProcessGroup)
    found = {}
    for case in CASES:
        sharding, model, gradients = case
        dtype = torch_dtype(model.dtype)
        kept = torch_dtype(gradients or model.dtype)
        together = train(model, gradients, data_parallel(members, CPU, sharding, dtype, kept), [rank])
        alone = train(model, gradients, SingleProcess(), list(range(NUM_RANKS)))
        start = train_nothing(model)
        moved = torch.cat([(a - s).flatten() for a, s in zip(alone, start, strict=True)])
        apart = torch.cat([(a - t).flatten() for a, t in zip(alone, together, strict=True)])
        found[name_of(case)] = [float(apart.abs().max()), float(moved.abs().max()), float(apart.norm() / moved.norm())]
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def train_nothing(model: ModelSpec) -> list[Tensor]:
    decoder = DecoderModel(
        model, candidate(1), ExplorationRequest(model=model), CPU, generator=torch.Generator().manual_seed(0)
    )
    return [parameter.detach().float() for parameter in decoder.parameters()]


if __name__ == "__main__":
    sys.exit(fork_ranks(partial(run, Path(sys.argv[1])), NUM_RANKS, shared=SHARDING))
