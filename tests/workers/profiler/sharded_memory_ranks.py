"""Two ranks that train sharded on the CPU, and what torch holds of parameters, gradients and optimizer meanwhile.

    python -m tests.workers.profiler.sharded_memory_ranks FOLDER

writes there, of the first rank, the highest bytes for each level of sharding and each format of gradients.
"""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from explorer.spec.candidate import Candidate
from explorer.spec.model import DType, ModelSpec
from explorer.spec.request import ExplorationRequest
from explorer.spec.training import Sharding
from tests.forked_ranks import SHARDING, fork_ranks
from workers.profiler.training.choice import data_parallel
from workers.targets.reference.decoder import DecoderModel
from workers.targets.reference.factory import random_tokens
from workers.targets.reference.optimizer import build_optimizer
from workers.targets.reference.shapes import torch_dtype

NUM_RANKS = 2
LEAST_BYTES = 1 << 12  # of a storage that counts
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
        num_layers=4,
        hidden_size=256,
        ffn_hidden_size=1024,
        num_attention_heads=4,
        vocab_size=512,
        seq_length=16,
        dtype=dtype,
    )
    training = {"sharding": sharding, "optimizer": {"grad_dtype": gradients}}
    return ExplorationRequest.model_validate(
        {"model": model, "num_devices": NUM_RANKS, "batch_size": 16, "training": training}
    )


class _Sizes(TorchDispatchMode):
    """The present sizes of all storages, which sharding makes larger and smaller where they are."""

    def __init__(self, existing: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.peak: int = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in existing:
            self._keep(tensor)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._keep(leaf)
        living = {key: storage for key, found in self._storages.items() if (storage := found()) is not None}
        self._storages = {key: self._storages[key] for key in living}  # the sum of each call is over these alone
        self.peak = max(self.peak, sum(storage.nbytes() for storage in living.values()))
        return result

    def _keep(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if 0 < storage.nbytes() < LEAST_BYTES:
            return
        self._storages[id(storage)] = weakref.ref(storage)


def measure(members: dist.ProcessGroup, case: Case, rank: int) -> int:
    """Highest bytes of a step's micro-steps, once everything exists."""
    request = request_of(case)
    model, spec = request.model, request.training.optimizer
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

    if rank > 0:
        micro_steps()
        optimizer.step()
        micro_steps()
        return 0
    micro_steps()
    optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    local = [x for x in gc.get_objects() if issubclass(type(x), Tensor) and not hasattr(x, "_local_tensor")]
    sizes = _Sizes(local)
    del local
    with sizes:
        micro_steps()
    return sizes.peak


def run(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(folder / "store"), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    members = dist.new_group(list(range(NUM_RANKS)))
    assert isinstance(members, dist.ProcessGroup)
    found = {name_of(case): measure(members, case, rank) for case in CASES}
    if rank == 0:
        (folder / "peaks.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(fork_ranks(partial(run, Path(sys.argv[1])), NUM_RANKS, shared=SHARDING))
