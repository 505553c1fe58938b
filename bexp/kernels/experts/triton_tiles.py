"""How the Triton kernels of the grouped GEMM divide their work, and which division suits a load."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a kernel divides its work: output tiles (block_m, block_n), and steps of block_k along the summed axis.

    `programs_per_multiprocessor` bounds the grid of the persistent kernel. `bulk_copies` asks for tensor descriptors
    where device and tensors allow them; with these, `halves` writes a tile in two parts, and `flatten` overlaps the end
    of a tile with the start of the next (forward and rows' gradient only).
    """

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_warps: int
    programs_per_multiprocessor: int = 1
    group_m: int = 8
    bulk_copies: bool = True
    halves: bool = False
    flatten: bool = False

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program at two bytes a number: the stages' operands and the tile on its way out."""
        stages = self.num_stages * (self.block_m + self.block_n) * self.block_k
        return 2 * (stages + self.block_m * self.stored_columns)

    @property
    def stored_columns(self) -> int:
        """Columns of a tile that are written at a time."""
        return self.block_n // 2 if self.halves else self.block_n


LARGE = Tiles(128, 256, 64, num_stages=3, num_warps=8)
SQUARE = Tiles(128, 128, 64, num_stages=4, num_warps=8)
LOW = Tiles(64, 128, 64, num_stages=4, num_warps=4, programs_per_multiprocessor=2)
SHALLOW = Tiles(128, 128, 32, num_stages=3, num_warps=4, programs_per_multiprocessor=2)
SMALL = Tiles(64, 64, 32, num_stages=3, num_warps=4, programs_per_multiprocessor=2)


def rows_tiles(rows_per_expert: float, device: torch.device) -> Tiles:
    """For forward and the gradient of the rows: low tiles while the matrices' bytes dominate, wide ones after."""
    return _fitting((LOW if rows_per_expert <= 64 else SQUARE if rows_per_expert <= 192 else LARGE, LOW), device)


def weights_tiles(rows_per_expert: float, device: torch.device) -> Tiles:
    """For the gradient of the matrices: shallow steps where there are few rows to sum over."""
    return _fitting((SHALLOW if rows_per_expert <= 128 else LARGE, SHALLOW), device)


def _fitting(choices: tuple[Tiles, ...], device: torch.device) -> Tiles:
    """The first that the device's shared memory holds; with fewer stages if none."""
    if device.type != "cuda":
        return SMALL
    properties = torch.cuda.get_device_properties(device)
    available = int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]  # not in torch's stubs
    return next((tiles for tiles in choices if tiles.shared_bytes <= available), replace(SMALL, num_stages=2))
