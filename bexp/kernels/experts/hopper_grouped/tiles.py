"""How the Hopper kernels divide their work, and which division suits a load."""

from __future__ import annotations

from dataclasses import dataclass, replace

MOST_ORDERED_EXPERTS = 512
"""A warp can sort at most this many experts in its registers."""
_REGISTERS = 65536
_THREADS_OF_A_GROUP = 128
_MOST_REGISTERS = 248
_MOST_CONSUMER_REGISTERS = 240
_WIDEST_INSTRUCTION_REGISTERS = 154
"""What ptxas asks for to hold 64 x 256 sums of a warpgroup; with fewer at the start it refuses the instruction."""
_MANY_EXPERTS = 256
_SEARCH_REGISTERS, _MANY_EXPERTS_REGISTERS = 56, 104
"""Registers a thread of the producer, which holds the bounds of all experts: up to `_MANY_EXPERTS`, and beyond."""
_BARRIER_BYTES = 1024
_SHARED_BYTES = 227 * 1024


@dataclass(frozen=True, slots=True)
class HopperTiles:
    """An output tile of consumers * rows by block_n, and block_k of the summed axis a step.

    Each of the 1 to 3 consumers is a warpgroup with `rows` (64 or 128) of the tile. It writes them in pieces of
    `columns` through `buffers` pieces of shared memory. `programs` share a multiprocessor.

    Where `dynamic`, the programs of the sum over rows take tiles as they become free, those of experts with many rows
    first; up to `MOST_ORDERED_EXPERTS`. The other products have tiles that are all alike.
    """

    consumers: int
    rows: int
    block_n: int
    block_k: int
    stages: int
    columns: int
    buffers: int = 1
    programs: int = 1
    group_m: int = 8
    dynamic: bool = False

    @property
    def block_m(self) -> int:
        """Rows of an output tile."""
        return self.consumers * self.rows

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program at two bytes a number: the stages, the pieces on their way out, the barriers."""
        operands = self.stages * (self.block_m + self.block_n) * self.block_k
        return 2 * (operands + self.block_m * self.columns * self.buffers) + _BARRIER_BYTES

    @property
    def fits(self) -> bool:
        """Whether a multiprocessor holds the programs."""
        return self.shared_bytes * self.programs <= _SHARED_BYTES

    @property
    def launch_registers(self) -> int:
        """Registers a thread that a program starts with: an even share for consumers and producer."""
        groups = self.programs * (self.consumers + 1)
        return min(_down_to_8(_REGISTERS // (groups * _THREADS_OF_A_GROUP)), _MOST_REGISTERS)

    @property
    def width(self) -> int:
        """Columns of a product instruction."""
        return min(self.block_n, 256 if self.launch_registers >= _WIDEST_INSTRUCTION_REGISTERS else 128)

    def producer_registers(self, num_experts: int) -> int:
        """Registers a thread of the producer's warpgroup."""
        if self.consumers == 3:
            return 32
        return _SEARCH_REGISTERS if num_experts <= _MANY_EXPERTS else _MANY_EXPERTS_REGISTERS

    def consumer_registers(self, num_experts: int) -> int:
        """Registers a thread of a consumer: what the producer leaves."""
        left = self.launch_registers * (self.consumers + 1) - self.producer_registers(num_experts)
        return min(_down_to_8(left // self.consumers), _MOST_CONSUMER_REGISTERS)


WIDE = HopperTiles(2, 64, 256, 64, stages=4, columns=128)
LONG = HopperTiles(2, 64, 256, 64, stages=3, columns=128, buffers=2)
SQUARE = HopperTiles(2, 64, 128, 64, stages=6, columns=128)
LOW_WIDE = HopperTiles(1, 64, 256, 64, stages=5, columns=128)
LOW = HopperTiles(1, 64, 128, 64, stages=8, columns=128)
NARROW = HopperTiles(1, 64, 64, 128, stages=6, columns=64)
MEDIUM = HopperTiles(2, 64, 256, 32, stages=5, columns=128, buffers=2)

_CYCLE_FLOPS = 4096
_CYCLE_LOADED_BYTES = 48
_CYCLE_MEMORY_BYTES = 2600
_TILE_CYCLES = 1000
_MANY_ROWS = 1024
"""Measured on an H200: FLOPs and loaded bytes a cycle of one multiprocessor, bytes a cycle that all of them read from
memory, and the overhead of a tile in cycles. From `_MANY_ROWS` rows an expert a second output buffer is faster."""


def rows_tiles(num_rows: int, num_experts: int, k: int, n: int, multiprocessors: int) -> HopperTiles:
    """For forward and the gradient of the rows: the least time if all experts had the same rows, wide tiles first."""
    mean = max(1, num_rows / num_experts)
    used = min(num_experts, num_rows)

    def cycles(tiles: HopperTiles) -> float:
        num_tiles = used * -(-mean // tiles.block_m) * -(-n // tiles.block_n)
        flops = 2 * tiles.block_m * tiles.block_n * k
        loaded = 2 * (tiles.block_m + tiles.block_n) * k
        tile = max(flops / _CYCLE_FLOPS, loaded / _CYCLE_LOADED_BYTES) + _TILE_CYCLES
        memory = 2 * (num_rows * (k + n) + used * k * n) / _CYCLE_MEMORY_BYTES
        return max(-(-num_tiles // multiprocessors) * tile, memory)

    if mean >= _MANY_ROWS:
        return LONG
    return min((LOW_WIDE, WIDE, SQUARE, LOW, NARROW) if mean <= 64 else (WIDE, SQUARE, LOW, NARROW), key=cycles)


def weights_tiles(num_experts: int, k: int, n: int, multiprocessors: int) -> HopperTiles:
    """For the gradient of the matrices.

    A tile's steps are its expert's rows, which the host does not know: where there are more tiles than programs, these
    take them as they become free.
    """
    num_tiles = num_experts * -(-k // MEDIUM.block_m) * -(-n // MEDIUM.block_n)
    uneven = 1 < num_experts <= MOST_ORDERED_EXPERTS and num_tiles > MEDIUM.programs * multiprocessors
    return replace(MEDIUM, dynamic=uneven)


def _down_to_8(registers: int) -> int:
    return registers // 8 * 8
