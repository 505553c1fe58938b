"""Sets of tiles that the fused experts' GEMMs are tried with, for many rows an expert."""

from __future__ import annotations

from workers.kernels.experts.fused.tiles import TileConfig

CANDIDATES: dict[str, tuple[TileConfig, ...]] = {
    "project_in": (
        TileConfig(128, 128, 64, 8, 3),
        TileConfig(128, 128, 64, 8, 3, tma=True),
        TileConfig(128, 128, 64, 8, 4, tma=True),
        TileConfig(128, 128, 64, 8, 4, tma=True, group=16),
        TileConfig(128, 128, 64, 8, 4, tma=True, flatten=True, per_multiprocessor=1),
        TileConfig(128, 128, 64, 8, 4, tma=True, copy=128),
        TileConfig(128, 128, 64, 8, 3, tma=True, flatten=True, per_multiprocessor=1, copy=128),
        TileConfig(128, 128, 64, 4, 4, tma=True, specialize=True, per_multiprocessor=1, copy=128),
        TileConfig(128, 128, 64, 4, 3, tma=True, specialize=True, per_multiprocessor=1, copy=128),
    ),
    "project_out": (
        TileConfig(128, 256, 64, 8, 3),
        TileConfig(128, 256, 64, 8, 4, tma=True),
        TileConfig(128, 256, 64, 8, 4, tma=True, group=16),
        TileConfig(256, 128, 64, 8, 4, tma=True),
        TileConfig(128, 256, 64, 8, 4, tma=True, flatten=True, per_multiprocessor=1),
        TileConfig(128, 256, 64, 4, 4, tma=True, specialize=True, per_multiprocessor=1),
        TileConfig(128, 256, 64, 4, 3, tma=True, specialize=True, per_multiprocessor=1),
        TileConfig(128, 128, 64, 4, 3, tma=True),
    ),
    "grad_hidden": (
        TileConfig(128, 128, 64, 8, 4, tma=True, parts=4),
        TileConfig(128, 128, 64, 8, 4, tma=True, parts=2),
        TileConfig(128, 128, 64, 4, 3, tma=True, parts=4),
        TileConfig(256, 128, 64, 8, 4, tma=True, parts=4),
        TileConfig(128, 256, 64, 8, 3, tma=True, parts=4),
        TileConfig(128, 128, 64, 8, 4, tma=True, parts=4, copy=128),
        TileConfig(256, 128, 64, 8, 4, tma=True, parts=4, copy=256),
        TileConfig(256, 128, 64, 8, 4, tma=True, parts=4, flatten=True, per_multiprocessor=1),
    ),
    "grad_input": (
        TileConfig(128, 256, 64, 8, 3),
        TileConfig(128, 256, 64, 8, 4, tma=True),
        TileConfig(256, 128, 64, 8, 4, tma=True),
        TileConfig(128, 256, 64, 8, 4, tma=True, flatten=True, per_multiprocessor=1),
        TileConfig(128, 256, 64, 4, 4, tma=True, specialize=True, per_multiprocessor=1),
        TileConfig(128, 256, 64, 4, 3, tma=True, specialize=True, per_multiprocessor=1),
    ),
    "grad_w_in": (
        TileConfig(128, 256, 64, 8, 3),
        TileConfig(128, 256, 64, 8, 4, tma=True),
        TileConfig(128, 256, 64, 8, 5, tma=True),
        TileConfig(256, 128, 64, 8, 5, tma=True),
        TileConfig(128, 128, 64, 4, 5, tma=True),
        TileConfig(128, 256, 64, 8, 4, tma=True, copy=128),
        TileConfig(128, 256, 64, 4, 4, tma=True, copy=128, specialize=True, per_multiprocessor=1),
        TileConfig(128, 256, 64, 4, 3, tma=True, copy=128, specialize=True, per_multiprocessor=1),
    ),
    "grad_w_out": (
        TileConfig(128, 256, 64, 8, 3),
        TileConfig(128, 256, 64, 8, 4, tma=True),
        TileConfig(128, 256, 64, 8, 5, tma=True),
        TileConfig(256, 128, 64, 8, 5, tma=True),
        TileConfig(128, 128, 64, 4, 5, tma=True),
        TileConfig(128, 256, 64, 8, 4, tma=True, copy=128),
        TileConfig(128, 256, 64, 4, 4, tma=True, copy=128, specialize=True, per_multiprocessor=1),
        TileConfig(128, 256, 64, 4, 3, tma=True, copy=128, specialize=True, per_multiprocessor=1),
    ),
}
