"""MoE layers by the clock and on the device, all contenders of a cell in turns, eager and as CUDA graphs.

    python -m benchmarks.moe_turns --out results/NAME.json [--minutes M] [--cells EXPERTS/TOP_K/MICRO_BATCH ...]

A layer is norm, router, top-k, experts of 2048 x 1408 (gated), combination and residual sum, forward and backward in
bfloat16, with uniform routes. The yardstick is the dense layer of as many active FLOPs, eager and compiled. Layers are
compiled, too, around back ends that torch.compile can trace. The clock's time is that of a loop of forwards and
backwards, the host included. The device's time is that of the same loop with its launches queued ahead. Both are
medians over the turns. `tests/gpu` compares the results of the back ends with float64.

At small micro-batches the host is the limit. There, both sides are timed as CUDA graphs too: forward and backward are
captured once, and replays are timed. A back end that waits for the device cannot be captured. liger-kernel's fused MoE
takes part where it is installed. It tunes itself in its first run, for minutes if Triton's cache lacks its kernels
(`TRITON_CACHE_AUTOTUNING=1` keeps what it finds for the next process).

Where there are few tokens an expert, the layer is bound by the experts' matrices: forward and the gradient of the rows
read them, and the gradient of the matrices is as large. The bound is these bytes over the measured bandwidth.

If the file exists, the run continues it. A file of other sources of the kernels is refused.
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
from torch import Tensor, nn

from benchmarks.environment import begin, describe_environment, kernels_digest, write_results
from benchmarks.turns import Run, TurnsBudget, seconds_once, time_in_turns
from bexp.explorer.cost.components import BlockRecompute
from bexp.explorer.dimensions.experts import WAITING_EXPERTS
from bexp.explorer.model.model import ModelSpec, MoESpec
from bexp.explorer.model.routing import RoutingSpec
from bexp.kernels.experts.registry import expert_backend, expert_support
from bexp.measure.timestamps import synchronize
from bexp.workers.instruments.failures import classify, is_poisoned
from bexp.workers.instruments.kernel_shapes import experts_shape
from bexp.workers.profiler.hardware import measure_hardware
from bexp.workers.targets.reference.ffn_block import DenseFFN, MoEFFN
from bexp.workers.targets.reference.weights import device_routes

HIDDEN, WIDTH, SEQ_LENGTH = 2048, 1408, 2048
MINUTES = 9.0
CELLS = (
    *((8, 2, 1), (128, 1, 1), (8, 2, 4), (128, 1, 4), (8, 2, 64), (128, 1, 64)),
    *((8, 2, 16), (128, 1, 16), (128, 8, 1), (128, 8, 64), (128, 2, 1), (128, 2, 64)),
    *((8, 1, 1), (8, 1, 64), (8, 8, 1), (8, 8, 64)),
)
"""Experts, top_k and micro-batch, those with a goal first."""
GRAPH_MICRO_BATCHES = (1, 4)
HOPELESS = 4.0
"""A back end that is so many times slower than the fastest before it runs once, and not in turns."""
BUDGET = TurnsBudget(rounds=15, most_seconds=8.0)
"""Enough for more than the fewest rounds at the largest micro-batch, where heat moves single turns."""
DENSE = ("dense eager", "dense compile")
LIGER, COMPILED, GRAPH = "liger", " compile", " graph"
CLOCKS = {"relative_to_dense": "seconds", "device_relative_to_dense": "device_seconds"}
"""By wall-clock (the larger of host and device) and by the device alone: the name of the ratio, and its time."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="start no cell after so long")
    parser.add_argument("--cells", nargs="+", default=CELLS, type=lambda text: tuple(map(int, text.split("/"))))
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * options.minutes
    device = torch.device("cuda", torch.cuda.current_device())
    hardware = measure_hardware(device, None)
    fresh: dict[str, Any] = {
        "environment": describe_environment(),
        "hardware": hardware.model_dump(mode="json"),
        "shape": {"seq_length": SEQ_LENGTH, "hidden_size": HIDDEN, "expert_ffn_hidden_size": WIDTH},
        "kernels": kernels_digest(),
        "rows": [],
    }
    try:
        results = begin(options.out, fresh, same=("shape", "kernels"))
    except ValueError as error:
        parser.error(str(error))
    for num_experts, top_k, micro_batch in missing(results["rows"], options.cells):
        if time.monotonic() > deadline:
            break
        cell = Cell(num_experts, top_k, micro_batch, device, hardware.memory_bandwidth_bytes_per_second)
        results["rows"] += cell.measure()
        compare_with_dense(results["rows"])
        write_results(options.out, results)
        for row in results["rows"]:
            if cell.key.items() <= row.items():
                print(describe(row), flush=True)
    return 0


def missing(
    rows: list[dict[str, Any]], cells: Iterable[tuple[int, int, int]] = CELLS
) -> Iterator[tuple[int, int, int]]:
    """The cells without rows."""
    done = {(row["num_experts"], row["top_k"], row["micro_batch_size"]) for row in rows}
    yield from (cell for cell in cells if cell not in done)


def compare_with_dense(rows: list[dict[str, Any]]) -> None:
    """Write both ratios into each row that was timed, against the faster dense layer for as many tokens.

    CUDA graphs are compared with dense layers that are graphs, too.
    """

    def alike(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["kind"], row["top_k"], row["micro_batch_size"], row["backend"].endswith(GRAPH)

    for ratio, seconds in CLOCKS.items():
        best: dict[tuple[Any, ...], float] = {}
        for row in rows:
            if row["backend"].removesuffix(GRAPH) in DENSE and seconds in row:
                best[alike(row)] = min(best.get(alike(row), math.inf), row[seconds])
        for row in rows:
            row.pop(ratio, None)
            if seconds in row and alike(row) in best:
                row[ratio] = best[alike(row)] / row[seconds]


class Cell:
    """One model at one micro-batch."""

    def __init__(
        self, num_experts: int, top_k: int, micro_batch: int, device: torch.device, bandwidth_bytes_per_second: float
    ) -> None:
        self.key = {"kind": "layer", "num_experts": num_experts, "top_k": top_k, "micro_batch_size": micro_batch}
        self._model = num_experts, top_k
        self._tokens = micro_batch * SEQ_LENGTH
        self._device = device
        generator = torch.Generator(device).manual_seed(0)
        shape = (micro_batch, SEQ_LENGTH, HIDDEN)
        self._x = torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)
        self._with_graphs = micro_batch in GRAPH_MICRO_BATCHES
        self._bandwidth = bandwidth_bytes_per_second
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._rows: dict[str, dict[str, Any]] = {}
        self._runs: dict[str, Run] = {}
        self._once: dict[str, float] = {}

    def measure(self) -> list[dict[str, Any]]:
        experts, top_k = self._model
        names = contenders(layer_model(*self._model), self._device)
        for name in (*DENSE, *sorted(names, key=_waits)):
            self._add(name)
        for name in names:
            if name in self._runs and _traceable(name):
                self._add(name + COMPILED)
        for name, timing in time_in_turns(self._runs, self._device, BUDGET).items():
            self._rows[name] |= {
                "seconds": timing.clock_seconds,
                "clock_error_seconds": timing.clock_error_seconds,
                "device_seconds": timing.device_seconds,
                "device_error_seconds": timing.device_error_seconds,
                "repeats": timing.rounds,
                "in_turns": True,
            }
        flops = 18 * self._tokens * top_k * HIDDEN * WIDTH
        bound = 3 * experts * 3 * HIDDEN * WIDTH * 2 / self._bandwidth
        for name, row in self._rows.items():
            if "seconds" in row:
                row["expert_flops_per_second"] = flops / row["seconds"]
                row["bound_seconds"] = bound if not name.startswith(DENSE) else None
        self._runs.clear()
        gc.collect()
        torch.cuda.empty_cache()
        return [self.key | {"backend": name} | row for name, row in self._rows.items()]

    def _add(self, name: str) -> None:
        """Prepare a contender's runs: eager, and as a graph where that is asked for and possible."""
        row = self._rows[name] = {}
        try:
            run = _training_run(self._block(name), self._x)
            once = self._once[name] = seconds_once(run, self._device)
        except Exception as error:  # noqa: BLE001 - whatever a contender raises is its outcome
            row["reason"] = self._reason(error)
            return
        others = [seconds for other, seconds in self._once.items() if not other.startswith(DENSE)]
        if not name.startswith(DENSE) and once > HOPELESS * min(others):
            row |= {"seconds": once, "device_seconds": once, "repeats": 1, "in_turns": False}
            return
        self._runs[name] = run
        if self._with_graphs and not _waits(name):
            graph = self._rows[name + GRAPH] = {}
            try:
                self._runs[name + GRAPH] = captured(run, self._device, self._pool)
            except Exception as error:  # noqa: BLE001 - whatever a capture raises is its outcome
                graph["reason"] = self._reason(error)

    def _block(self, name: str) -> nn.Module:
        if name in DENSE:
            return dense_block(self._model[1], self._device, compiled=name.endswith(COMPILED))
        return layer_block(name, *self._model, self._tokens, self._device)

    def _reason(self, error: Exception) -> str:
        if is_poisoned(self._device):
            raise error
        return classify(error)[1] or type(error).__name__


def layer_model(num_experts: int, top_k: int) -> ModelSpec:
    """A model of one layer; its dense FFN has the width of the active experts."""
    return ModelSpec(
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=top_k * WIDTH,
        num_attention_heads=16,
        vocab_size=1024,
        seq_length=SEQ_LENGTH,
        moe=MoESpec(num_experts=num_experts, top_k=top_k, expert_ffn_hidden_size=WIDTH),
    )


def contenders(model: ModelSpec, device: torch.device) -> tuple[str, ...]:
    """Every back end that serves the model here, and liger-kernel's fused MoE where it is installed."""
    shape = experts_shape(model)
    assert shape is not None, "a model with experts"
    return tuple(support.name for support in expert_support(shape, device, [LIGER]) if support.reason is None)


def layer_block(name: str, num_experts: int, top_k: int, num_tokens: int, device: torch.device) -> MoEFFN:
    """The whole layer on the back end `name`, or with everything around the experts compiled."""
    model, backend = layer_model(num_experts, top_k), name.removesuffix(COMPILED)
    block = MoEFFN(model, backend=backend, recompute=BlockRecompute.NONE, device=device, training=True)
    block.set_routes(device_routes(model, RoutingSpec(), num_tokens, 0, device))
    if backend == LIGER:  # its matrices are stored the other way
        block.w_in, block.w_out = (nn.Parameter(w.detach().mT.contiguous().mT) for w in (block.w_in, block.w_out))
    if name.endswith(COMPILED):
        block.compile_core()
    return block


def dense_block(top_k: int, device: torch.device, *, compiled: bool) -> DenseFFN:
    layer = DenseFFN(layer_model(top_k, top_k), recompute=BlockRecompute.NONE, device=device, training=True)
    if compiled:
        layer.compile_core()
    return layer


def captured(run: Run, device: torch.device, pool: Any) -> Run:
    """Return the replay of what `run` launches, captured after three runs on another stream.

    Graphs of one `pool` share their memory, so no two of them may be replayed at once.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        run()
    return graph.replay


def describe(row: dict[str, Any]) -> str:
    """One line."""
    head = f"E={row['num_experts']:<4}k={row['top_k']:<2}m={row['micro_batch_size']:<3}{row['backend']:24}"
    if "seconds" not in row:
        return f"{head} {row.get('reason')}"
    bound = row.get("bound_seconds")
    return (
        f"{head}{row['seconds'] * 1e3:9.3f} ms by the clock, {row['device_seconds'] * 1e3:9.3f} on the device, "
        f"x{row['relative_to_dense']:.3f} and x{row['device_relative_to_dense']:.3f} of dense"
        + (f", {bound / row['seconds']:.0%} of the bound" if bound else "")
    )


def _training_run(block: nn.Module, x: Tensor) -> Run:
    """A forward and backward that writes the gradients of the input and of every parameter."""
    leaf = x.detach().requires_grad_()
    wanted = [leaf, *(p for p in block.parameters() if p.requires_grad)]
    gradient = torch.randn_like(x)

    def run() -> None:
        torch.autograd.grad(block(leaf), wanted, gradient, allow_unused=True)

    return run


def _waits(name: str) -> bool:
    """Whether a contender waits for the device; liger-kernel asks it for the number of tiles."""
    if name in DENSE or name.endswith(COMPILED):
        return False
    return name in WAITING_EXPERTS


def _traceable(name: str) -> bool:
    """Whether the layer can be compiled around the back end."""
    return torch.bfloat16 in expert_backend(name).traceable_dtypes


if __name__ == "__main__":
    sys.exit(main())
