"""Two ranks that train sharded, and write the most bytes that torch holds of their state, by level and format."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.model import DType, ModelSpec
from bexp.explorer.model.training import Sharding
from bexp.explorer.request.request import ExplorationRequest
from bexp.measure.memory_meters import LiveStorages
from bexp.workers.instruments.kernel_shapes import torch_dtype
from bexp.workers.targets.reference.decoder import DecoderModel
from bexp.workers.targets.reference.factory import random_tokens
from bexp.workers.training.data_parallel import data_parallel
from bexp.workers.training.optimizer import build_optimizer
from tests.forked_ranks import SHARDING, fork_ranks

NUM_RANKS = 2
CPU = torch.device("cpu")
CASES = [
    (sharding, dtype, gradients)
    for sharding in (Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3)
    for dtype, gradients in ((DType.FLOAT32, None), (DType.BFLOAT16, None), (DType.BFLOAT16, DType.FLOAT32))
]
Case = tuple[Sharding, DType, DType | None]


def name_of(case: Case) -> str:
    """Level and formats."""
    sharding, dtype, gradients = case
    return f"{sharding}-{dtype}-{gradients or dtype}"


def request_of(case: Case) -> ExplorationRequest:
    """Of a model whose activations are nothing beside its parameters."""
    sharding, dtype, gradients = case
    model = ModelSpec(
        name="deep",
        num_layers=3,
        hidden_size=192,
        ffn_hidden_size=768,
        num_attention_heads=4,
        vocab_size=384,
        seq_length=8,
        dtype=dtype,
    )
    training = {"sharding": sharding, "optimizer": {"grad_dtype": gradients}}
    return ExplorationRequest.model_validate(
        {"model": model, "num_devices": NUM_RANKS, "batch_size": 16, "training": training}
    )


def measure(members: dist.ProcessGroup, case: Case, rank: int, meter: LiveStorages) -> int:
    """Highest bytes of a step's micro-steps, once everything exists, in the best of six steps.

    On a busy host a reduction may still hold its gradients when those of the next layer are made.
    """
    request = request_of(case)
    model, spec = request.shapes, request.training.optimizer
    formats = torch_dtype(model.dtype), torch_dtype(spec.gradient_dtype(model.dtype))
    parallel = data_parallel(members, CPU, request.training.sharding, *formats)
    candidate = Candidate(micro_batch_size=1, attention_backend="flash", num_query_groups=4)
    decoder = DecoderModel(model, candidate, request, CPU, take_unit=parallel.take)
    wrapped = parallel.wrap(decoder)
    optimizer = build_optimizer(decoder.parameters(), spec, model.dtype)
    tokens = random_tokens(model, (1, model.seq_length), CPU, torch.Generator().manual_seed(rank))

    def micro_steps() -> None:
        for is_last in (False, False, True):
            with parallel.micro_step(is_last=is_last):
                wrapped(tokens, tokens).backward()

    micro_steps()
    optimizer.step()
    peaks = []
    for _ in range(6):
        optimizer.zero_grad()
        meter.reset_peak()
        micro_steps()
        peaks.append(meter.peak_bytes)
    return min(peaks)


def run(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(folder / "store"), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    members = dist.new_group(list(range(NUM_RANKS)))
    assert isinstance(members, dist.ProcessGroup)
    found: dict[str, int] = {}
    for case in CASES:
        with LiveStorages() as meter:
            found[name_of(case)] = measure(members, case, rank, meter)
    if rank == 0:
        (folder / "peaks.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(fork_ranks(partial(run, Path(sys.argv[1])), NUM_RANKS, shared=SHARDING))
