"""What the expert kernels cost the host: microseconds a call, and as a multiple of one small operation of torch's.

    python -m benchmarks.launch_cost --out results/NAME.json

The shapes are so small that the device waits for the host. A call is timed in short rows, so that the queue of
launches never fills; the unit is doctor's: the host's time of one in-place addition. The contenders run in turns, and
the median over the rounds counts, with the least and the greatest beside it. Each is checked against float64.

`autograd alone` runs an autograd function that only allocates its results, which is the least that any layer costs.
Most of it is the start of a backward pass, which a training step pays once for all layers. `a layer in a chain`
is therefore the difference between chains of CHAINED layers, over the difference of their lengths.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from benchmarks.environment import describe_environment, write_results
from benchmarks.expert_reference import relative_error
from benchmarks.launch_cases import (
    GEMMS,
    SMALL_LAYERS,
    Gemm,
    Layer,
    both_ways,
    gradients_of_reference,
    layer_inputs,
    random,
    without_gradients,
)
from bexp.kernels.autograd import applied
from bexp.kernels.experts.auto.digest import kernels_digest
from bexp.kernels.experts.registry import expert_backend
from bexp.kernels.experts.rows import Rows

CALLS = 20
CHAINED = (2, 10)
ROUNDS = 11
WARM_UP = 3
TOLERANCE = 2e-2
LAYERS = ("fused", "hopper_grouped", "triton_grouped", "grouped_mm")
NOTHING = "autograd alone"
ALL = (*LAYERS, NOTHING)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table and write one JSON file; returns 1 if a result is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launch_cost", description="Host time of kernels.")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    device = torch.device("cuda")
    results: dict[str, Any] = {
        "environment": describe_environment(),
        "device": torch.cuda.get_device_name(device),
        "kernels": kernels_digest(),
    }
    unit = median_seconds({"add": partial(torch.zeros(16, device=device).add_, 1.0)})["add"]["median"]
    results["launch_us"] = unit * 1e6
    print(f"one launch: {unit * 1e6:.1f} us")
    results["gemms"] = [measure_gemms(gemm, device, unit) for gemm in GEMMS]
    results["layers"] = [measure_layers(layer, device, unit) for layer in SMALL_LAYERS]
    if options.out is not None:
        write_results(options.out, results)
    wrong = [case for part in ("gemms", "layers") for case in results[part] if max(case["errors"].values()) > TOLERANCE]
    for case in wrong:
        print(f"wrong: {case}", file=sys.stderr)
    return 1 if wrong else 0


def measure_gemms(gemm: Gemm, device: torch.device, unit: float) -> dict[str, Any]:
    """Host time of each product of the grouped GEMMs alone, and of forward and backward through autograd."""
    from bexp.kernels.experts import triton_gemm  # noqa: PLC0415 - needs Triton
    from bexp.kernels.experts.hopper import gemm as hopper  # noqa: PLC0415 - needs Triton

    num_rows = gemm.num_experts * gemm.rows_per_expert
    x = random((num_rows, gemm.k), device).requires_grad_()
    w = random((gemm.num_experts, gemm.k, gemm.n), device, 1 / gemm.k**0.5).requires_grad_()
    grad = random((num_rows, gemm.n), device)
    ends = (torch.arange(gemm.num_experts, device=device, dtype=torch.int32) + 1) * gemm.rows_per_expert
    plain = (x.detach(), w.detach())
    runs: dict[str, Callable[[], object]] = {}
    rows = Rows(ends, ends, ends)
    for name, module in (("hopper_grouped", hopper), ("triton_grouped", triton_gemm)):
        runs[f"{name} multiply_rows"] = partial(module.multiply_rows, *plain, ends)
        runs[f"{name} sum_over_rows"] = partial(module.sum_over_rows, plain[0], grad, ends)
        runs[f"{name} forward and backward"] = partial(both_ways, module.grouped_gemm, (x, w), (rows,), grad)
    runs["grouped_mm"] = partial(torch.nn.functional.grouped_mm, *plain, offs=ends)
    runs["grouped_mm forward and backward"] = partial(both_ways, _grouped_mm, (x, w), (ends,), grad)
    runs["autograd alone, forward and backward"] = partial(both_ways, _nothing, (x, w), (), grad)
    exact = x.detach().double().view(gemm.num_experts, -1, gemm.k)
    wanted = {
        "multiply_rows": (exact @ w.detach().double()).flatten(0, 1),
        "sum_over_rows": exact.mT @ grad.double().view(gemm.num_experts, -1, gemm.n),
    }
    errors = {
        name: relative_error(_tensor(run()), wanted[name.split()[1]])
        for name, run in runs.items()
        if name.endswith(("multiply_rows", "sum_over_rows"))
    }
    return _table({"gemm": asdict(gemm), "errors": errors}, runs, unit)


def measure_layers(layer: Layer, device: torch.device, unit: float) -> dict[str, Any]:
    """Host time of whole expert FFNs."""
    inputs, routes, grad = layer_inputs(layer, device)
    runs: dict[str, Callable[[], object]] = {}
    errors: dict[str, float] = {}
    wanted = gradients_of_reference(inputs, routes, grad)
    for name in LAYERS:

        def forward(x: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor, name: str = name) -> Tensor:
            return expert_backend(name).forward(x, routes, weights, w_in, w_out, "silu")

        runs[f"{name} forward"] = partial(without_gradients, forward, inputs)
        runs[f"{name} forward and backward"] = partial(both_ways, forward, inputs, (), grad)
        found = both_ways(forward, inputs, (), grad)
        pairs = zip(("out", "x", "weights", "w_in", "w_out"), found, wanted, strict=True)
        errors |= {f"{name} {part}": relative_error(actual, expected) for part, actual, expected in pairs}
    runs["autograd alone, forward and backward"] = partial(both_ways, _nothing, inputs, (), grad)
    result = _table({"layer": asdict(layer), "errors": errors}, runs | _parts(inputs, routes, grad), unit)
    chains: dict[str, Callable[[], object]] = {
        f"{name} {length}": _chain(name, length, inputs, routes, grad) for name in ALL for length in CHAINED
    }
    chained = median_seconds(chains, calls=2)
    result["chain_seconds"] = chained
    short, long = CHAINED
    for name in ALL:
        seconds = (chained[f"{name} {long}"]["median"] - chained[f"{name} {short}"]["median"]) / (long - short)
        result["launches"][f"{name}, a layer in a chain"] = seconds / unit
        print(f"{name + ', a layer in a chain':60s} {seconds * 1e6:8.1f} us {seconds / unit:7.2f} launches")
    return result


def _chain(
    name: str, length: int, inputs: tuple[Tensor, ...], routes: Tensor, grad: Tensor
) -> Callable[[], tuple[Tensor, ...]]:
    """Forward and backward of that many layers, each with matrices of its own."""
    x, *others = inputs
    layers = [[tensor.detach().clone().requires_grad_() for tensor in others] for _ in range(length)]
    leaves = (x, *(tensor for layer in layers for tensor in layer))

    def forward(x: Tensor, *_: Tensor) -> Tensor:
        for weights, w_in, w_out in layers:
            if name == NOTHING:
                x = _nothing(x, weights, w_in, w_out)
            else:
                x = expert_backend(name).forward(x, routes, weights, w_in, w_out, "silu")
        return x

    return partial(both_ways, forward, leaves, (), grad)


def _parts(inputs: tuple[Tensor, ...], routes: Tensor, grad: Tensor) -> dict[str, Callable[[], object]]:
    """Parts of the fused layer's time: without autograd, without allocations, and without looking anything up."""
    from bexp.kernels.allocation import empty  # noqa: PLC0415 - needs Triton
    from bexp.kernels.experts.fused.function import plan_for  # noqa: PLC0415 - needs Triton
    from bexp.kernels.launcher import current_stream  # noqa: PLC0415 - needs Triton

    x, weights, w_in, w_out = (tensor.detach() for tensor in inputs)
    operands = (x, routes, weights, w_in, w_out)
    plan = plan_for(*operands, "silu", keep=True)
    out, pre, permutation = plan.forward(*operands)
    assert pre is not None
    kept = pre
    steps = plan._forward
    work = empty(x, (steps.work.numel,), (1,), x.dtype)
    stream = current_stream(x.get_device())
    tensors = (*operands, permutation, kept, work, out)
    launches = partial(steps.launches, stream, *tensors)
    for _ in range(2):
        launches()
    bound = steps.launches._bound.get(tuple(tensor.data_ptr() for tensor in tensors), [])

    def driver_alone() -> None:
        for launcher, *grid, arguments in bound:
            launcher(*grid, stream, *arguments)

    return {
        "fused: finding the plan": partial(plan_for, *operands, "silu", keep=True),
        "fused: forward without autograd": partial(plan.forward, *operands),
        "fused: backward without autograd": partial(plan.backward, grad, x, weights, w_in, w_out, kept, permutation),
        f"fused: forward's {len(steps.launches._launches)} launches": launches,
        f"fused: forward's {len(bound)} launches, the driver alone": driver_alone,
        "one allocation": partial(empty, x, (16, 512), (512, 1), x.dtype),
        "one allocation by torch.empty": partial(torch.empty, 16, 512, dtype=x.dtype, device=x.device),
    }


def median_seconds(runs: dict[str, Callable[[], object]], calls: int = CALLS) -> dict[str, dict[str, float]]:
    """The seconds of a call on the host, the contenders in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            for _ in range(WARM_UP):  # the others have pushed its code and addresses out of the caches
                run()
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(calls):
                run()
            seconds[name].append((time.perf_counter() - started) / calls)
    return {
        name: {"median": statistics.median(found), "least": min(found), "greatest": max(found)}
        for name, found in seconds.items()
    }


class _Nothing(Function):
    """Allocates its results and launches nothing."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return inputs[0].new_empty(inputs[0].shape[0], inputs[-1].shape[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors)


_nothing = applied(_Nothing)


def _table(result: dict[str, Any], runs: dict[str, Callable[[], object]], unit: float) -> dict[str, Any]:
    result["host_seconds"] = median_seconds(runs)
    result["launches"] = {name: seconds["median"] / unit for name, seconds in result["host_seconds"].items()}
    for name, launches in result["launches"].items():
        sizes = result.get("gemm") or result.get("layer")
        print(f"{name:60s} {result['host_seconds'][name]['median'] * 1e6:8.1f} us {launches:7.2f} launches {sizes}")
    return result


def _grouped_mm(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return torch.nn.functional.grouped_mm(x, w, offs=ends)


def _tensor(result: object) -> Tensor:
    assert isinstance(result, Tensor)
    return result


if __name__ == "__main__":
    sys.exit(main())
