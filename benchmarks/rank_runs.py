"""What measurements over several ranks share: how these join, agree on what failed, and take the slowest's time."""

from __future__ import annotations

import argparse
import json
import os
import time
import traceback
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.environment import describe_environment, write_results
from bexp.measure.timestamps import synchronize

TIMEOUT = timedelta(minutes=3)
UNFINISHED = "it ended the processes, or did not end"
Row = dict[str, Any]


def parser_of(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a command over several ranks, with the options that each has."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try this out")
    parser.add_argument("--until", type=float, default=170.0, help="begin no row after these seconds")
    return parser


def join_ranks(kind: str, timeout: timedelta = TIMEOUT) -> torch.device:
    """Join the ranks that torchrun has started, on devices of a kind, `cuda` or `cpu`; return this rank's device."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # of one host, whose name may not be known
    device = torch.device(kind, dist.get_node_local_rank() if kind == "cuda" else 0)
    if kind == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, timeout=timeout)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timeout)
    return device


def slowest_seconds(run: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """Return the seconds of a call on the slowest rank."""
    dist.barrier()
    synchronize(device)
    started = time.perf_counter()
    for _ in range(calls):
        run()
    synchronize(device)
    return largest((time.perf_counter() - started) / calls, device)


def largest(value: float, device: torch.device) -> float:
    """Return the largest of the ranks' values."""
    found = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def peak_bytes(device: torch.device) -> int | None:
    """Return the largest of the ranks' peaks since `torch.cuda.reset_peak_memory_stats`; None on a CPU."""
    return int(largest(torch.cuda.max_memory_allocated(device), device)) if device.type == "cuda" else None


class Rows:
    """A file of rows, each measured by all ranks together, and a summary of them.

    A row is written before it is measured, too: if it takes the processes with it, a second start goes on after it. The
    ranks agree on errors over a group of the host, which works while a device waits for a rank that has failed. If the
    hosts of other ranks wait as well, the rank that has failed writes the row, and all end.
    """

    def __init__(
        self,
        path: Path,
        device: torch.device,
        until: float,
        summarize: Callable[[Sequence[Row]], Any],
        **setting: Any,
    ) -> None:
        self._path, self._device, self._summarize = path, device, summarize
        self._ends_at = time.monotonic() + until
        self._hosts = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        fresh = {"device": name, "num_devices": dist.get_world_size(), **setting, "rows": []}
        self._results: Row = self.same([json.loads(path.read_text()) if path.exists() else fresh])
        self._results["environment"] = describe_environment()

    def measure(self, measure: Callable[[], Row], **key: Hashable) -> Row:
        """Return the row with what `measure` returns or why it failed; empty if the time is over before it begins."""
        rows: list[Row] = self._results["rows"]
        for row in rows:
            if all(row.get(name) == value for name, value in key.items()):
                return row
        if not self.same([time.monotonic() < self._ends_at]):
            return {}
        rows.append({**key, "error": UNFINISHED})
        self._write()
        error = ""
        found: Row = {}
        try:
            found = measure()
        except Exception as raised:  # noqa: BLE001 - whatever a contender raises is its row
            error = f"{type(raised).__name__}: {str(raised)[:500]}"
            traceback.print_exc()
        errors: list[Any] = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(errors, error, group=self._hosts)
        except RuntimeError:  # the others wait for this rank inside what they measure
            if error and json.loads(self._path.read_text())["rows"][-1].get("error") == UNFINISHED:
                rows[-1] = {**key, "error": error}  # the first to tell is the cause
                self._write(anyone=True)
            raise
        rows[-1] = {**key, **found} if not any(errors) else {**key, "error": next(filter(None, errors))}
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._write()
        if dist.get_rank() == 0:
            print(rows[-1], flush=True)
        return rows[-1]

    def same(self, value: list[Any]) -> Any:
        """Return the first rank's value, which each rank hands over as the one item of a list."""
        dist.broadcast_object_list(value, src=0, group=self._hosts)
        return value[0]

    def _write(self, *, anyone: bool = False) -> None:
        if anyone or dist.get_rank() == 0:
            self._results["summary"] = self._summarize(self._results["rows"])
            write_results(self._path, self._results)
