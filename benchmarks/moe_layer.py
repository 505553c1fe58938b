"""Whole expert FFNs and whole MoE layers, each back end against a dense FFN of the same active FLOPs.

    python -m benchmarks.moe_layer --out results/NAME.json [--quick]

The experts are 2048 x 1408 (gated), with sequences of 2048 tokens, uniform routing and bfloat16. A layer is norm,
router, top-k, experts, combination and residual sum, forward and backward. Gradients of the weights are written and not
added to earlier ones, in dense layers, too. Times are those of `CudaTimer`: device events, medians, a cold second-level
cache, sustained clocks. The table of `auto` is measured before its cells. Every back end is first checked against
float64 in the same process.

If the file exists, the run continues it: its rows are kept, and the missing ones are timed.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.continuation import begin
from benchmarks.environment import describe_environment, write_results
from benchmarks.expert_reference import expert_ffn, relative_error
from benchmarks.moe_contenders import (
    AUTO,
    DENSE,
    WIDTH,
    compiled_name,
    contenders,
    dense_block,
    expert_block,
    hidden_states,
    layer_block,
    layer_model,
    prepare_auto,
    recomputing_name,
)
from benchmarks.moe_summary import CLOCKS, compare_with_dense
from bexp.kernels.experts.auto.digest import kernels_digest
from bexp.measure.cuda_timing import CudaTimer
from bexp.measure.memory import measure_memory
from bexp.measure.passes import ModulePasses
from bexp.measure.timing import TimingBudget

SEQ_LENGTH = 2048
TOLERANCE = 1e-2
COMPILED_MICRO_BATCHES = (16, 64)
"""The cells whose dense layer and fastest back end are also compiled, and the latter also run with less kept."""
HOPELESS = 4.0
"""A back end this many times slower than the fastest at a smaller micro-batch is not timed at larger ones."""


class ShortTimer(CudaTimer):
    """The time per cell is short, because there are many."""

    BUDGET = TimingBudget(min_repeats=5, max_repeats=20, seconds=0.25)
    MAX_WARM_UP_SECONDS = 0.3


class FreshGradients(ModulePasses):
    """Passes whose backward writes the gradients of the weights instead of adding to earlier ones."""

    def __init__(self, block: torch.nn.Module, *inputs: torch.Tensor) -> None:
        hidden_states = tuple(x.detach().requires_grad_() for x in inputs)
        super().__init__(block, hidden_states, training=True, gradient_dtype=torch.bfloat16)

    def prepare_forward(self) -> None:
        """Forget the last gradients."""
        for parameter in self.module.parameters():
            parameter.grad = None
        super().prepare_forward()


def main(arguments: list[str] | None = None) -> int:
    """Check, time, print and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="few cells, in less than 90 seconds")
    parser.add_argument("--seconds", type=float, help="stop starting cells after so long (default: 330, quick 75)")
    options = parser.parse_args(arguments)
    device = torch.device("cuda")
    deadline = time.monotonic() + (options.seconds or (75 if options.quick else 330))
    fresh: dict[str, Any] = {
        "environment": describe_environment(),
        "device": torch.cuda.get_device_name(device),
        "kernels": kernels_digest(),
        "options": {"quick": options.quick},
        "shape": {"seq_length": SEQ_LENGTH, "hidden_size": 2048, "expert_ffn_hidden_size": WIDTH},
        "errors": [],
        "rows": [],
    }
    try:
        results = begin(options.out, fresh, same=("device", "kernels", "options", "shape"))
    except ValueError as error:
        parser.error(str(error))
    if results["rows"]:
        print(f"{options.out}: {len(results['rows'])} rows are kept and not timed again")
    bench = Bench(ShortTimer(device), device, deadline, results["rows"])
    earlier, changed = results.pop("left_out", None), False  # not known before the end
    for kind, num_experts, top_k, micro_batches in layer_cells(options.quick):
        model = {"num_experts": num_experts, "top_k": top_k}
        if kind == "experts" and not any(model.items() <= row.items() for row in results["errors"]):
            if bench.expired:
                bench.left_out.append({"kind": "check"} | model)
            else:
                results["errors"] += check(num_experts, top_k, device)
                changed = True
        if bench.measure(kind, num_experts, top_k, micro_batches) or changed:
            changed = True
            write_results(options.out, results)
    if changed or earlier is None:
        write_results(options.out, results | {"left_out": bench.left_out})
    print_tables(results["rows"])
    if bench.left_out:
        print(f"left out for want of time: {len(bench.left_out)} rows")
    failed = [row for row in results["errors"] if not row["error"] <= TOLERANCE]
    for row in failed:
        print("WRONG", row)
    return 1 if failed else 0


def layer_cells(quick: bool) -> Iterator[tuple[str, int, int, tuple[int, ...]]]:
    """What is timed: whole layers first, since those are the goal."""
    if quick:
        yield "layer", 128, 1, (4, 64)
        yield "layer", 8, 2, (64,)
        yield "experts", 128, 1, (64,)
        yield "experts", 8, 2, (64,)
        return
    for num_experts, top_k in ((128, 1), (8, 2)):
        yield "layer", num_experts, top_k, (1, 4, 16, 64)
    for num_experts, top_k in ((128, 1), (8, 2)):
        yield "experts", num_experts, top_k, (64,)
    for num_experts, top_k in ((128, 8), (128, 2), (8, 1), (8, 8)):
        yield "layer", num_experts, top_k, (1, 64)
    yield "experts", 128, 8, (1, 64)


def check(num_experts: int, top_k: int, device: torch.device) -> list[dict[str, Any]]:
    """Relative errors against float64, of the output and of every gradient, at a micro-batch of one."""
    x = hidden_states(1, SEQ_LENGTH, device).view(SEQ_LENGTH, -1)
    gradient = torch.randn_like(x)
    rows = []
    reference: dict[str, torch.Tensor] = {}
    for name in ("float64", *contenders(layer_model(num_experts, top_k), device)):
        block = expert_block(name if name != "float64" else "loop", num_experts, top_k, SEQ_LENGTH, device, seed=1)
        inputs = {"x": x, "weights": block.routing_weights(SEQ_LENGTH), "w_in": block.w_in, "w_out": block.w_out}
        dtype = torch.float64 if name == "float64" else torch.bfloat16
        leaves = {key: value.detach().to(dtype).requires_grad_() for key, value in inputs.items()}
        run = expert_ffn if name == "float64" else block.run
        arguments = (leaves["x"], block.routes, leaves["weights"], leaves["w_in"], leaves["w_out"])
        out = run(*arguments, "silu")
        out.backward(gradient.to(dtype))
        found = {"out": out.detach()} | {key: leaf.grad for key, leaf in leaves.items() if leaf.grad is not None}
        if name == "float64":
            reference = found
            continue
        if block.transposes:
            found = {key: value.transpose(1, 2) if key.startswith("w_") else value for key, value in found.items()}
        for key, value in found.items():
            error = relative_error(value, reference[key])
            rows.append({"num_experts": num_experts, "top_k": top_k, "backend": name, "of": key, "error": error})
        del out, leaves, found, block
        torch.cuda.empty_cache()
    return rows


class Bench:
    """Times cells and keeps their rows, those of an earlier start included."""

    def __init__(self, timer: CudaTimer, device: torch.device, deadline: float, rows: list[dict[str, Any]]) -> None:
        self._timer = timer
        self._device = device
        self._deadline = deadline
        self.rows = rows
        self.left_out: list[dict[str, Any]] = []

    @property
    def expired(self) -> bool:
        """Whether nothing more should be started."""
        return time.monotonic() > self._deadline

    def measure(self, kind: str, num_experts: int, top_k: int, micro_batches: tuple[int, ...]) -> bool:
        """One row a micro-batch and back end; relative to the faster of eager and compiled dense at the same tokens.

        Returns whether anything was timed. What has a row already is not.
        """
        before, hopeless = len(self.rows), set[str]()
        names = contenders(layer_model(num_experts, top_k), self._device)
        for micro_batch in sorted(micro_batches):
            cell = {"kind": kind, "num_experts": num_experts, "top_k": top_k, "micro_batch_size": micro_batch}
            start, compiles = len(self.rows), micro_batch in COMPILED_MICRO_BATCHES
            for name in (*DENSE, *names):
                if name not in hopeless and (name != "dense compile" or compiles):
                    self._add(cell, name)
            eager = self._seconds(cell, names)
            if kind == "layer" and compiles and eager:
                done = {row["backend"] for row in self._rows(cell)}
                for variant in (compiled_name, recomputing_name):
                    if not any(variant(name) in done for name in names):
                        self._add(cell, variant(min(eager, key=eager.__getitem__)))
            compare_with_dense(self.rows)
            hopeless |= {name for name, seconds in eager.items() if seconds > HOPELESS * min(eager.values())}
            for row in self.rows[start:]:
                print(describe(row), flush=True)
        return len(self.rows) > before

    def _add(self, cell: dict[str, Any], name: str) -> None:
        """A row, unless there is one; a dense block does not depend on the number of experts, and is timed once."""
        rows = [row for row in self.rows if row["backend"] == name]
        if any(cell.items() <= row.items() for row in rows):
            return
        if name in DENSE:
            block = {key: value for key, value in cell.items() if key != "num_experts"}
            for row in rows:
                if block.items() <= row.items():
                    self.rows.append({key: value for key, value in row.items() if key not in CLOCKS} | cell)
                    return
        if self.expired:
            self.left_out.append(cell | {"backend": name})
            return
        found = time_one(name=name, timer=self._timer, device=self._device, **cell)
        self.rows.append(cell | {"backend": name} | found)

    def _rows(self, cell: dict[str, Any]) -> list[dict[str, Any]]:
        return [row for row in self.rows if cell.items() <= row.items()]

    def _seconds(self, cell: dict[str, Any], names: Iterable[str]) -> dict[str, float]:
        return {
            row["backend"]: row["seconds"] for row in self._rows(cell) if row["backend"] in names and "seconds" in row
        }


def time_one(
    *, kind: str, name: str, num_experts: int, top_k: int, micro_batch_size: int, timer: CudaTimer, device: torch.device
) -> dict[str, Any]:
    """Seconds, rate and bytes of one block, or why there are none."""
    tokens = micro_batch_size * SEQ_LENGTH
    x = hidden_states(micro_batch_size, SEQ_LENGTH, device)
    try:
        if name.startswith(AUTO):
            prepare_auto(num_experts, top_k, tokens, device)
        if name in DENSE:
            block = dense_block(kind, top_k, device, compiled=name == "dense compile")
        elif kind == "layer":
            block = layer_block(name, num_experts, top_k, tokens, device)
        else:
            block = expert_block(name, num_experts, top_k, tokens, device)
        if kind == "experts":
            x = x.view(tokens, -1)
        passes = FreshGradients(block, x)
        timer.warm_up(passes)
        timing = timer.time(passes)
        weight = measure_memory(passes, device)
    except torch.cuda.OutOfMemoryError:
        return {"reason": "out of memory"}
    finally:
        passes = None  # type: ignore[assignment]  # lets go of it
        block = None  # type: ignore[assignment]  # lets go of it
        gc.collect()
        torch.cuda.empty_cache()
    seconds = max(timing.device_seconds, timing.host_seconds)
    flops = 18 * tokens * top_k * 2048 * WIDTH
    return {
        "seconds": seconds,
        "device_seconds": timing.device_seconds,
        "forward_device_seconds": timing.forward_device_seconds,
        "host_seconds": timing.host_seconds,
        "standard_error_seconds": timing.standard_error_seconds,
        "expert_flops_per_second": flops / seconds,
        "saved_bytes": weight.saved,
        "forward_peak_bytes": weight.forward_peak,
        "backward_peak_bytes": weight.backward_peak,
    }


def describe(row: dict[str, Any]) -> str:
    """One line."""
    head = (
        f"{row['kind']:8}E={row['num_experts']:<4}k={row['top_k']:<2} m={row['micro_batch_size']:<3}{row['backend']:15}"
    )
    if "seconds" not in row:
        return f"{head} {row['reason']}"
    gib = 1 << 30
    return (
        f"{head}{row['device_seconds'] * 1e3:9.3f} ms (forward {row['forward_device_seconds'] * 1e3:8.3f}, "
        f"host {row['host_seconds'] * 1e3:7.3f}) {row['expert_flops_per_second'] / 1e12:6.1f} TFLOP/s "
        f"x{row.get('device_relative_to_dense', math.nan):.3f} of dense on the device, "
        f"x{row.get('relative_to_dense', math.nan):.3f} with the host, saved {row['saved_bytes'] / gib:6.2f} GiB, "
        f"peak {max(row['forward_peak_bytes'], row['backward_peak_bytes']) / gib:6.2f} GiB"
    )


def print_tables(rows: list[dict[str, Any]]) -> None:
    """Throughput relative to dense by micro-batch, a line a back end."""
    for kind in ("layer", "experts"):
        for cell in sorted({(row["num_experts"], row["top_k"]) for row in rows if row["kind"] == kind}):
            mine = [row for row in rows if row["kind"] == kind and (row["num_experts"], row["top_k"]) == cell]
            sizes = sorted({row["micro_batch_size"] for row in mine})
            print(f"{kind} E={cell[0]} k={cell[1]}: of dense at m = {', '.join(map(str, sizes))}")
            for name in dict.fromkeys(row["backend"] for row in mine):
                by_size = {r["micro_batch_size"]: r.get("relative_to_dense") for r in mine if r["backend"] == name}
                cells = (f"{by_size[size]:.3f}" if by_size.get(size) else "-" for size in sizes)
                print(f"  {name:15}", *(f"{text:>7}" for text in cells))


if __name__ == "__main__":
    sys.exit(main())
