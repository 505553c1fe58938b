"""Times every GEMM of the fused experts, alone, with every set of tiles."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from benchmarks.moe_contenders import HIDDEN, WIDTH, expert_block, hidden_states
from benchmarks.moe_tiles import CANDIDATES
from workers.kernels.experts.fused.tiles import FusedTiles, TileConfig, default_tiles

REPEATS = 7


def sweep_tiles(device: torch.device, quick: bool) -> tuple[list[dict[str, Any]], dict[int, FusedTiles]]:
    """Rows of GEMM, tiles and rate; and the fastest at the largest batch, by number of experts."""
    rows = []
    fastest: dict[int, FusedTiles] = {}
    for num_experts, top_k, micro_batch in (
        ((128, 1, 64), (8, 2, 32)) if quick else ((128, 1, 64), (8, 2, 64), (128, 1, 8))
    ):
        found = _sweep(num_experts, top_k, micro_batch, device)
        rows += found
        choice: dict[str, TileConfig] = {}
        for field in fields(FusedTiles):
            mine = sorted((r for r in found if r["gemm"] == field.name and "seconds" in r), key=lambda r: r["seconds"])
            if mine:
                choice[field.name] = next(t for t in _tried(field.name) if t.label == mine[0]["tiles"])
            for row in mine[:3]:
                flops = row["flops_per_second"] / 1e12
                print(
                    f"E={num_experts} m={micro_batch} {field.name:12} {flops:6.1f} TFLOP/s  {row['tiles']}", flush=True
                )
        for row in found:
            if "reason" in row:
                print(f"E={num_experts} {row['gemm']} {row['tiles']}: {row['reason']}")
        fastest.setdefault(num_experts, default_tiles(1 << 20, num_experts, True, 2).replaced(**choice))
    return rows, fastest


def _tried(gemm: str) -> tuple[TileConfig, ...]:
    default: TileConfig = getattr(default_tiles(1 << 20, 8, True, 2), gemm)
    return tuple(dict.fromkeys((*CANDIDATES[gemm], default)))


def _sweep(num_experts: int, top_k: int, micro_batch: int, device: torch.device) -> list[dict[str, Any]]:
    from workers.kernels.experts.fused import gemms  # noqa: PLC0415 - needs Triton
    from workers.kernels.experts.fused.gemms import Operand  # noqa: PLC0415
    from workers.kernels.experts.fused.order import gather_tiles, order_pairs  # noqa: PLC0415

    tokens = micro_batch * 2048
    block = expert_block("fused", num_experts, top_k, tokens, device)
    w_in, w_out, weights = block.w_in.detach(), block.w_out.detach(), block.router_weights.detach()
    x = hidden_states(micro_batch, 2048, device).view(tokens, -1)
    grad = torch.randn_like(x)
    base = default_tiles(tokens * top_k, num_experts, True, 2)
    order = order_pairs(block.routes, num_experts, (64, 128, 256, base.project_in.block_m))
    hidden, pre = gemms.project_in(
        Operand(x, "tokens"), weights, w_in, WIDTH, "silu", order, base.project_in, keep=True
    )
    assert pre is not None
    grad_pre = torch.randn_like(pre)
    out = torch.empty(tokens * top_k, HIDDEN, dtype=x.dtype, device=device)
    flush = torch.empty(128 << 20, dtype=torch.uint8, device=device)

    def operand(tensor: torch.Tensor, tile: TileConfig) -> Operand:
        if not tile.copy:
            return Operand(tensor, "tokens")
        return Operand(gather_tiles(tensor, order, tile.copy), "padded", tile.copy)

    def launch(gemm: str, tile: TileConfig) -> Callable[[], object]:
        """The gathering of a copy is part of what is timed."""
        calls: dict[str, Callable[[], object]] = {
            "project_in": lambda: gemms.project_in(
                operand(x, tile), weights, w_in, WIDTH, "silu", order, tile, keep=True
            ),
            "project_out": lambda: gemms.project_back(hidden, w_out, order, tile, transposed=False, out=out),
            "grad_hidden": lambda: gemms.differentiate_hidden(
                operand(grad, tile), weights, pre, w_out, "silu", order, tile
            ),
            "grad_input": lambda: gemms.project_back(grad_pre, w_in, order, tile, transposed=True, out=out),
            "grad_w_in": lambda: gemms.sum_outer_products(operand(x, tile), Operand(grad_pre, "rows"), order, tile),
            "grad_w_out": lambda: gemms.sum_outer_products(Operand(hidden, "rows"), operand(grad, tile), order, tile),
        }
        return calls[gemm]

    rows: list[dict[str, Any]] = []
    for gemm in CANDIDATES:
        flops = 2 * tokens * top_k * HIDDEN * WIDTH * (2 if gemm in {"project_in", "grad_input", "grad_w_in"} else 1)
        for tile in _tried(gemm):
            row = {"num_experts": num_experts, "micro_batch_size": micro_batch, "gemm": gemm, "tiles": tile.label}
            try:
                seconds = _time(launch(gemm, tile), flush)
                rows.append(row | {"seconds": seconds, "flops_per_second": flops / seconds})
            except Exception as error:  # noqa: BLE001 - Triton's compiler raises what it likes, and others may do
                rows.append(row | {"reason": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"})
    return rows


def _time(run: Callable[[], object], flush: torch.Tensor) -> float:
    """Median seconds over repeats without a pause, each from a cold second-level cache."""
    for _ in range(3):
        run()
    events = []
    for _ in range(REPEATS):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(float(start.elapsed_time(end)) for start, end in events) / 1e3
