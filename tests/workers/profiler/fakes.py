"""A GPU as a test wants it."""

from __future__ import annotations

from dataclasses import dataclass, field

from bexp.measure.gpu_processes import GpuProcessMonitor
from bexp.measure.nvml import Gpu

MIB = 1 << 20
CONTEXT = 500 * MIB


@dataclass
class FakeGpu(Gpu):
    """Says what its fields hold. `others` is memory that this process does not hold, `own` outside the allocator."""

    clocks: list[int | None] = field(default_factory=lambda: [1980])
    reasons: tuple[str, ...] = ("sw_power_cap",)
    watts: float | None = 650.4
    celsius: int | None = 61
    pids: frozenset[int] | None = frozenset({7})
    shares: dict[int, float] | None = None
    reserved: int = 0
    own: int = CONTEXT
    others: int | None = 0
    polls: int = 0

    def sm_clock_mhz(self) -> int | None:
        self.polls += 1
        return self.clocks[min(self.polls, len(self.clocks)) - 1]

    def sm_clock_max_mhz(self) -> int | None:
        return 1980

    def memory_clock_mhz(self) -> int | None:
        return 3201

    def power_watts(self) -> float | None:
        return self.watts

    def temperature_celsius(self) -> int | None:
        return self.celsius

    def clock_reasons(self) -> tuple[str, ...]:
        return self.reasons

    def used_bytes(self) -> int | None:
        return None if self.others is None else self.others + self.own + self.reserved

    def processes(self) -> frozenset[int] | None:
        return self.pids

    def busy_shares(self, since_microseconds: int) -> dict[int, float] | None:
        return self.shares

    def foreign_processes(self, used_before: int | None = 0) -> GpuProcessMonitor:
        """Of a process that has just made its context."""
        return GpuProcessMonitor(self, lambda: self.reserved, used_before, frozenset())
