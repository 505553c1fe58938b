"""Whether the attention back end that the explorer picks is the fastest, when all are timed again independently.

    python -m benchmarks.attention_choice --out results/NAME.json [--seconds S]

All cells run causal attention in bfloat16, forward and backward, with 32 heads and the same number of tokens. For each
sequence length, head size and number of query groups, `explore` runs on a model that is mostly attention, and the back
end is its only choice. After the profiler has ended, the whole attention block is timed again in this process on every
back end, in turns. The result is the device's time of the chosen back end over that of the fastest.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import describe_environment, write_results
from bexp.explorer.cost_model.components import Component, ComponentKind
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.trial import Measure
from bexp.explorer.search.explore import explore
from bexp.explorer.spec.model import ModelSpec
from bexp.explorer.spec.request import ExplorationRequest
from bexp.kernels.attention import attention_backend
from bexp.measure.turns import Run, TurnsBudget, time_in_turns
from bexp.workers.instruments.failures import classify
from bexp.workers.instruments.kernel_shapes import attention_shape, torch_dtype
from bexp.workers.process.profiler import Profiler
from bexp.workers.targets.reference.factory import build_block

SEQ_LENGTHS = (8192, 512, 32768, 2048, 16384, 1024, 4096)
"""The order makes sure that a run that is cut short has both short and long ones."""
HEAD_SIZES = (128, 64)
TOKENS, NUM_HEADS = 32768, 32
NUM_LAYERS, NARROW = 4, 128
"""Few layers, and an FFN and a vocabulary of this size, so that a step is attention and little else."""
WITHIN = 1.01
SECONDS, PICKING_SHARE = 240.0, 0.7
"""No exploration starts after this share of the time."""
LOCK_SECONDS, TRIAL_SECONDS = 60.0, 30.0
BUDGET = TurnsBudget(rounds=25, hopeless=2.0, most_seconds=1.5)


def main(arguments: list[str] | None = None) -> int:
    """Explore, time again, print and write one JSON file; 1 if nothing could be compared."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="start nothing after so long")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seq-lengths", type=int, nargs="+", default=SEQ_LENGTHS)
    parser.add_argument("--head-sizes", type=int, nargs="+", default=HEAD_SIZES)
    parser.add_argument("--num-heads", type=int, default=NUM_HEADS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    options = parser.parse_args(arguments)
    started = time.monotonic()
    results: dict[str, Any] = {
        "environment": describe_environment(),
        **{"tokens": options.tokens, "num_heads": options.num_heads, "within": WITHIN},
        **{"cells": [], "left_out": []},
    }
    picked: list[tuple[dict[str, Any], ExplorationRequest, DeviceReport]] = []
    with Profiler(options.device, lock_timeout_seconds=LOCK_SECONDS) as profiler:
        results["hardware"] = profiler.hardware().model_dump(mode="json")
        for cell in cells(options):
            if time.monotonic() > started + PICKING_SHARE * options.seconds:
                results["left_out"].append(cell)
                continue
            request = request_of(cell)
            report = profiler.begin(request)
            picked.append((cell | pick(request, report, profiler.measure), request, report))
    device = torch.device(options.device)
    for cell, request, report in picked:
        if time.monotonic() > started + options.seconds:
            results["left_out"].append(cell)
            continue
        timed = time_back_ends(request, [support.name for support in report.attention_backends], device)
        results["cells"].append(cell | {"timed": timed, "verdict": {"block": verdict(cell["picked"], timed)}})
        results["summary"] = {"cells": len(results["cells"]), "block": summary(results["cells"])}
        write_results(options.out, results)
        print(cell, results["cells"][-1]["verdict"])
    print(results.get("summary"), f"left out for want of time: {len(results['left_out'])} shapes")
    return 0 if results["cells"] else 1


def cells(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The shapes, with multi-head, grouped and multi-query attention."""
    heads = options.num_heads
    for seq_length in options.seq_lengths:
        for head_size in options.head_sizes:
            for kind, groups in {"MHA": heads, "GQA": max(1, heads // 4), "MQA": 1}.items():
                sizes = {"seq_length": seq_length, "head_size": head_size, "num_heads": heads, "query_groups": groups}
                yield sizes | {"kind": kind, "micro_batch_size": max(1, options.tokens // seq_length)}


def request_of(cell: dict[str, Any]) -> ExplorationRequest:
    """A request in which only the attention back end varies."""
    model = ModelSpec(
        name="attention",
        num_layers=NUM_LAYERS,
        hidden_size=cell["num_heads"] * cell["head_size"],
        ffn_hidden_size=NARROW,
        num_attention_heads=cell["num_heads"],
        num_query_groups=cell["query_groups"],
        vocab_size=NARROW,
        seq_length=cell["seq_length"],
    )
    only = {"micro_batch_size": cell["micro_batch_size"], "bta": {"enable": False}, "recompute": ["none"]}
    budget = {"trial_timeout_seconds": TRIAL_SECONDS}
    return ExplorationRequest.model_validate({"model": model, **only, "budget": budget, "verify": False})


def pick(request: ExplorationRequest, report: DeviceReport, measure: Measure) -> dict[str, Any]:
    """Return what `explore` recommends, and the outcomes of its trials."""
    answer = None
    trials: list[dict[str, Any]] = []
    for step in explore(request, report, measure):
        answer = step.answer or answer
        if step.trial is not None:
            measured = step.trial.measurement
            trial = {"back_end": measured.candidate.attention_backend, "outcome": measured.outcome.value}
            trials.append({**trial, "reason": measured.reason, "seconds": step.trial.seconds})
    recommendation = answer.recommendation if answer else None
    chosen = (
        {"picked": recommendation.candidate.attention_backend, "confidence": recommendation.confidence}
        if recommendation
        else {"picked": None}
    )
    return chosen | {"trials": trials}


def time_back_ends(
    request: ExplorationRequest, names: list[str], device: torch.device, budget: TurnsBudget = BUDGET
) -> dict[str, dict[str, Any]]:
    """Seconds of the attention block on every back end, or why there are none."""
    assert request.model is not None
    timed: dict[str, dict[str, Any]] = {}
    runs: dict[str, Run] = {}
    for name in names:
        reason = attention_backend(name).unsupported_reason(attention_shape(request.model), device)
        if reason is not None:
            timed[name] = {"reason": reason}
            continue
        try:
            run = block_pass(request, name, device)
            run()
            runs[name] = run
        except Exception as error:  # noqa: BLE001 - whatever a back end raises is its outcome
            timed[name] = {"reason": classify(error)[1] or type(error).__name__}
    for name, timing in time_in_turns(runs, device, budget).items():
        seconds = {"seconds": timing.device_seconds, "standard_error_seconds": timing.device_error_seconds}
        timed[name] = {**seconds, "clock_seconds": timing.clock_seconds}
    return timed


def block_pass(request: ExplorationRequest, name: str, device: torch.device) -> Run:
    """Forward and backward of a whole attention block: norm, projections, positions, attention."""
    model, micro_batch_size = request.model, request.micro_batch_size
    assert model is not None
    assert isinstance(micro_batch_size, int)
    component = Component(kind=ComponentKind.ATTENTION, micro_batch_size=micro_batch_size, backend=name)
    generator = torch.Generator(device).manual_seed(0)
    block = build_block(model, component, request, device, generator=generator)
    size = (micro_batch_size, model.seq_length, model.hidden_size)
    dtype = torch_dtype(model.dtype)
    x, gradient = (torch.randn(size, dtype=dtype, device=device, generator=generator) for _ in range(2))
    x.requires_grad_()

    def run() -> None:
        x.grad = None
        torch.autograd.backward(block(x), gradient)

    return run


def verdict(picked: str | None, timed: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the fastest by the independent timing, and the time of the chosen one over it; None if it has none."""
    seconds = {name: run["seconds"] for name, run in timed.items() if "seconds" in run}
    best = min(seconds, key=seconds.__getitem__, default=None)
    ratio = seconds[picked] / seconds[best] if best is not None and picked in seconds else None
    return {"best": best, "ratio": ratio, "within": ratio is not None and ratio <= WITHIN}


def summary(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many choices are within 1% of the fastest, and the worst. A choice without a time is not within."""
    verdicts = [cell["verdict"]["block"] for cell in cells]
    ratios = [each["ratio"] for each in verdicts if each["ratio"] is not None]
    return {"within": sum(each["within"] for each in verdicts), "worst_ratio": max(ratios, default=None)}


if __name__ == "__main__":
    sys.exit(main())
