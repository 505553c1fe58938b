from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

import bexp
from tests.gpu.needs import one_gpu
from tests.waits import PATIENCE_SECONDS

pytestmark = one_gpu()


@pytest.fixture
def limit() -> Iterator[int]:
    """The bytes that this process may have, so that other processes on the device neither lack memory nor matter."""
    gc.collect()
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + (2 << 30)
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    yield 2 << 30
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_size_that_does_not_fit_is_found_out_and_the_process_goes_on(limit: int) -> None:
    model = nn.Linear(1024, 1024, device="cuda")
    held = torch.cuda.memory_allocated()
    rows = limit // 4096 // 12  # a sequence's input and output take a sixth of the limit

    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        return loss.detach()

    found = bexp.explore(
        step=step, batch=lambda m: torch.randn(m * rows, 1024, device="cuda"), sizes=(1, 2, 4, 8), parameters=model
    )
    assert found.micro_batch_size in {1, 2}
    assert found.peak_bytes is not None
    assert found.peak_bytes < held + limit
    assert torch.cuda.memory_allocated() < held + limit // 20


def _rank(rank: int, store: Path, answers: Any) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2)

    def step(x: torch.Tensor) -> None:
        dist.all_reduce(x)
        if rank == 1 and len(x) >= 2:
            raise torch.OutOfMemoryError("the middle")
        dist.all_reduce(x)

    begun = time.monotonic()
    found = bexp.explore(step=step, batch=lambda m: torch.ones(m, device="cuda"), deadline_seconds=20.0)
    answers[rank] = (found, time.monotonic() - begun)


@pytest.mark.several_gpus
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_nobody_waits_for_a_process_that_fails_between_two_nccl_operations(tmp_path: Path) -> None:
    with multiprocessing.Manager() as manager:
        answers = manager.dict()
        spawn(_rank, args=(tmp_path / "store", answers), nprocs=2)
        (found, seconds), (other, _) = (answers[rank] for rank in (0, 1))
    assert found == other
    assert found.micro_batch_size == 1
    assert found.results[-1].outcome == "out_of_memory"
    assert not found.group_is_usable
    assert seconds < PATIENCE_SECONDS
