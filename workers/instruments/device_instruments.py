"""The device of this process: its timer, its random numbers, and its memory between trials."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import TypeVar

import torch

from bexp.measure import host_limits as host
from bexp.measure.cuda_timing import CudaTimer
from bexp.measure.heap import trim
from bexp.measure.heap_holes import run_without_holes
from bexp.measure.timing import BlockTimer, HostTimer
from bexp.transformers.settings import Allocator
from bexp.workers.instruments.device_monitor import DeviceMonitor
from bexp.workers.instruments.kernel_builder import KernelBuilder
from bexp.workers.instruments.rank_group import SINGLE_RANK, RankGroup

T = TypeVar("T")

TOLERATED_LEFTOVER_BYTES = 256 << 20
"""Bytes that libraries may keep for ever: workspaces of cuBLAS and cuDNN, constants of compiled code."""


class Instruments:
    """One device, ready for trials. On the CPU `num_ranks` processes share the host's cores."""

    def __init__(self, device: torch.device, num_ranks: int = 1) -> None:
        self.device = device
        self.monitor = DeviceMonitor(cores=device.type == "cpu" and num_ranks == 1)
        self.rank_group: RankGroup = SINGLE_RANK
        self.kernels: KernelBuilder | None = None
        self.timer: BlockTimer
        if device.type == "cuda":
            torch.cuda.set_device(device)
            self.timer = CudaTimer(device)
        else:
            # torch starts with a thread for each CPU, or with as many as OMP_NUM_THREADS asks for.
            torch.set_num_threads(max(1, min(torch.get_num_threads(), host.usable_cores() // num_ranks)))
            self.timer = HostTimer(alone=num_ranks == 1)
        self._baseline_bytes = self._settled_bytes()

    def join(self, rank_group: RankGroup) -> None:
        """Run the next trial with these ranks."""
        self.rank_group = rank_group
        self.timer.reducer = rank_group

    @property
    def own_bytes(self) -> int:
        """Bytes allocated for measuring, which a training process does not need."""
        return self._baseline_bytes

    def generator(self, seed: int) -> torch.Generator:
        """A source of random numbers on the device."""
        return torch.Generator(self.device).manual_seed(seed)

    def limit_memory(self, limit_bytes: int, context_bytes: int) -> None:
        """Make allocations beyond a limit fail as out of memory. The runtime's context counts towards the limit."""
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            share = max(1.0, limit_bytes - context_bytes) / total
            torch.cuda.set_per_process_memory_fraction(min(1.0, share), self.device)
        else:
            host.limit_data(limit_bytes)

    def within_memory(self, run: Callable[[], T]) -> T:
        """Return the result of `run`, which a heap with holes must not make run out of memory.

        Ranks never run anything twice: each would wait for the others.
        """
        return run_without_holes(run) if self.device.type == "cpu" and self.rank_group.size == 1 else run()

    def use_allocator(self, allocator: Allocator) -> None:
        """Allocate from now on as the job's training will; call this while nothing is cached."""
        if self.device.type == "cuda":
            expandable = allocator == "expandable_segments"
            # Newer torch warns of the name in torch.cuda.memory, and the warning would stand in each crash's reason.
            change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
            (change or torch.cuda.memory._set_allocator_settings)(f"expandable_segments:{expandable}")

    def settle(self, *, release: bool, kept_bytes: int = 0) -> int:
        """Free what a trial left; return the bytes that cannot be freed, 0 if they are tolerated.

        `kept_bytes` stay on purpose: the target's weights. `release` also returns cached memory to the device. This is
        needed after a trial that ran out of memory, and before a trial whose reserved memory is measured.
        """
        expected = self._baseline_bytes + (kept_bytes if self.device.type == "cuda" else 0)
        left = self._settled_bytes() - expected
        if left > TOLERATED_LEFTOVER_BYTES and "torch._dynamo" in sys.modules:
            torch.compiler.reset()
            left = self._settled_bytes() - expected
        if self.device.type == "cuda":
            if release or left > TOLERATED_LEFTOVER_BYTES:
                torch.cuda.empty_cache()
        else:
            trim()
        return left if left > TOLERATED_LEFTOVER_BYTES else 0

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _settled_bytes(self) -> int:
        gc.collect()
        if self.device.type != "cuda":
            return 0
        torch.cuda.synchronize(self.device)
        clear_workspaces()
        return torch.cuda.memory_allocated(self.device)


def clear_workspaces() -> None:
    """Free the memory that cuBLAS keeps for each thread and stream that it was used on."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
