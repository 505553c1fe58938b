"""How the Hopper kernels of the fused FFN divide their work."""

from __future__ import annotations

from dataclasses import dataclass

from bexp.kernels.experts.fused.layouts import Layout
from bexp.kernels.experts.hopper_grouped.tiles import HopperTiles

_REGISTERS = 65536
_THREADS_OF_A_WARP = 32
_WARPS_OF_A_GROUP = 4
_CONSUMERS = 2
_MOST_CONSUMER_REGISTERS = 240
_BARRIER_BYTES = 1024
_SHARED_BYTES = 227 * 1024


@dataclass(frozen=True, slots=True)
class HopperTile:
    """A tile of 128 rows and 256 columns, those of gate and up together, by steps of `block_k`.

    Two warpgroups multiply 64 rows each. If `gathered`, the producer gathers the tokens itself; else they are gathered
    beforehand. `other_registers` are those of a thread of epilogue and producer, which share a warpgroup's.
    """

    gathered: bool
    block_k: int = 64
    stages: int = 3
    group: int = 8
    epilogue_warps: int = 2
    other_registers: int = 128

    ROWS = 64
    BLOCK_N = 256
    PIECES_AHEAD = 2
    PIECE = (32, 64)

    @property
    def block_m(self) -> int:
        """Rows of a tile."""
        return _CONSUMERS * self.ROWS

    @property
    def gathers(self) -> tuple[Layout, int]:
        """How the tokens that the GEMM reads lie."""
        return ("tokens" if self.gathered else "rows"), 1

    @property
    def producer_warps(self) -> int:
        """One thread starts bulk copies; gathering takes more."""
        return 2 if self.gathered else 1

    @property
    def launch_registers(self) -> int:
        """Registers a thread that a program starts with."""
        return _REGISTERS // ((_CONSUMERS + self._other_groups) * _WARPS_OF_A_GROUP * _THREADS_OF_A_WARP) // 8 * 8

    @property
    def consumer_registers(self) -> int:
        """Registers a thread of a consumer: what the others leave."""
        left = self.launch_registers * (_CONSUMERS + self._other_groups) - self.other_registers * self._other_groups
        return min(left // _CONSUMERS // 8 * 8, _MOST_CONSUMER_REGISTERS)

    @property
    def fits(self) -> bool:
        """Whether shared memory holds the stages, the sums of a tile, and pieces of gate and up on their way."""
        operands = self.stages * (self.block_m + self.BLOCK_N) * self.block_k
        pieces = 2 * self.PIECES_AHEAD * self.PIECE[0] * self.PIECE[1]
        return 2 * (operands + self.block_m * self.BLOCK_N + pieces) + _BARRIER_BYTES <= _SHARED_BYTES

    @property
    def _other_groups(self) -> int:
        return -(-(self.epilogue_warps + self.producer_warps) // _WARPS_OF_A_GROUP)


@dataclass(frozen=True, slots=True)
class HopperSum:
    """The gradient of the matrices by the grouped GEMM's kernel, of rows gathered beforehand; None takes its choice."""

    tiles: HopperTiles | None = None

    @property
    def gathers(self) -> tuple[Layout, int]:
        """How the tokens that the GEMM reads lie."""
        return "rows", 1


@dataclass(frozen=True, slots=True)
class HopperRows:
    """A product of rows in the experts' order, by the grouped GEMM's kernel; None takes its choice of tiles.

    The rows of the result are in the experts' order, too: whatever sums them to tokens gathers them. With one expert a
    token there is no sum, and each row is written to its token.
    """

    tiles: HopperTiles | None = None


GATE_UP_GEMM = HopperTile(gathered=True)
GRAD_HIDDEN = HopperTile(gathered=False, other_registers=160)
