"""Throughput over micro-batch: transformers' own classes, this product's whole model, and the sum of its components.

    python -m benchmarks.transformers_curve --device cuda:0 --out benchmarks/results/NAME.json \\
        [--seconds S] [examples/llama-3.2-1b.yaml examples/olmoe-1b-7b.yaml]

The best micro-batch is found with this product's layers, so their throughput must depend on the micro-batch in the same
way as that of the user's model. A step has two accumulated micro-steps (forward, loss over full logits, backward) and
torch's fused AdamW without master weights. At each micro-batch it is timed with LlamaForCausalLM or OlmoeForCausalLM
(SDPA, no cache, `grouped_mm` experts if the version has them) in a process of its own, then with the product's default
back ends, by component and whole. Curves are tokens/s over the whole effective batch, relative to the smallest
micro-batch. The parameter counts of both sides must agree. Routers run on both sides, and tokens go where the request's
routing says. The imbalance of transformers' random routers stands beside the times.

This needs transformers (4.57 or 5), which the product itself does not: `pip install transformers`. A run continues an
existing `--out` of the same device and versions. No further case starts after `--seconds`.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.continuation import begin
from benchmarks.curves import summarize
from benchmarks.environment import describe_environment, write_results
from benchmarks.isolation import Isolated, Lost
from benchmarks.recorded_candidates import arrays_of
from benchmarks.transformers_models import EXPERTS, time_training
from bexp.explorer.cost_model.candidate_table import SpaceTable
from bexp.explorer.cost_model.components import Component
from bexp.explorer.cost_model.step import combine_seconds
from bexp.explorer.formats.document import load_document
from bexp.explorer.formats.request import parse_request
from bexp.explorer.records.measurement import ComponentMeasurement, Outcome
from bexp.explorer.records.trial import TrialKind, TrialPlan
from bexp.explorer.spec.candidate import Candidate
from bexp.explorer.spec.execution import Execution
from bexp.explorer.spec.hardware import DeviceReport
from bexp.explorer.spec.request import ExplorationRequest
from bexp.explorer.spec.training import LossSpec, OptimizerSpec, TrainingSpec
from bexp.workers.process.environment import CHILD_DEFAULTS
from bexp.workers.process.profiler import Profiler
from bexp.workers.targets.reference.routes import device_routes

CONFIGS = (Path("examples/llama-3.2-1b.yaml"), Path("examples/olmoe-1b-7b.yaml"))
TRAINING = TrainingSpec(optimizer=OptimizerSpec(master_dtype=None), loss=LossSpec(kind="full"))
TIMEOUT_SECONDS = 180.0


def main(arguments: list[str] | None = None) -> int:
    """Time every case, print the curves and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("configs", nargs="*", type=Path, default=CONFIGS)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--micro-batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seconds", type=float, default=480.0, help="begin no further case after so long")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    if find_spec("transformers") is None:
        print("transformers is missing: pip install transformers", file=sys.stderr)
        return 2
    deadline = time.monotonic() + options.seconds
    sizes = sorted(set(options.micro_batch_sizes))
    if "PYTORCH_ALLOC_CONF" not in os.environ:  # else the newer name of the same setting
        os.environ |= CHILD_DEFAULTS | os.environ  # both sides number devices, allocate and wait alike
    results: dict[str, Any] = {}
    for path in options.configs:
        request = prepare(parse_request(load_document(path.read_text())))
        profiler = Profiler(options.device)
        try:
            profiler.start()
            report = profiler.begin(request)
            if not results:
                try:
                    results = begin(options.out, _fresh(report), same=("transformers", "training"))
                except ValueError as error:
                    parser.error(str(error))
            keep = partial(write_results, options.out, results)
            curve = Curve(path.stem, request, report, options.device, results["rows"], deadline, keep)
            with Isolated() as isolated:
                curve.time_transformers(isolated, sizes)
            curve.time_product(profiler, sizes)
        finally:
            profiler.close()
        results["summary"] = summarize(results["rows"])
        write_results(options.out, results)
    print_curves(results["summary"])
    return 0


def prepare(request: ExplorationRequest) -> ExplorationRequest:
    """The request with what transformers' models are trained with here: plain AdamW, and a loss over full logits.

    Raises:
        ValueError: it is not about training on one device.
    """
    if request.mode != "train" or request.num_devices != 1:
        raise ValueError("only training on one device is compared")
    return request.model_copy(update={"training": TRAINING, "execution": Execution.EAGER})


class Curve:
    """The rows of one configuration. Those that exist are not timed again; `keep` is called after each new one."""

    def __init__(
        self,
        name: str,
        request: ExplorationRequest,
        report: DeviceReport,
        device: str,
        rows: list[dict[str, Any]],
        deadline: float = math.inf,
        keep: Callable[[], None] = lambda: None,
    ) -> None:
        self.rows = rows
        self._name = name
        self._request = request
        self._report = report
        self._device = device
        self._deadline = deadline
        self._keep = keep

    def time_transformers(self, isolated: Isolated, micro_batch_sizes: list[int]) -> None:
        """Transformers' class at every micro-batch; what is larger than one that does not fit is not tried.

        Raises:
            ValueError: it has no such model, or another number of parameters.
        """
        side = "transformers"
        for size in self._missing(side, micro_batch_sizes):
            if not self._may(side, size):
                continue
            found = isolated.call(
                time_training,
                self._request.model,
                size,
                self._device,
                self._request.routing,
                self._request.seed,
                seconds=TIMEOUT_SECONDS,
            )
            if isinstance(found, Lost):
                outcome = Outcome.TIMED_OUT if found.timed_out else Outcome.CRASHED
                found = {"outcome": outcome.value, "reason": found.reason}
            self._add(side, size, found)

    def time_product(self, profiler: Profiler, micro_batch_sizes: list[int]) -> None:
        """The same with the product's layers, by component and whole."""
        todo = {side: self._missing(side, micro_batch_sizes) for side in ("composed", "whole")}
        candidates = [self._candidate(size) for size in micro_batch_sizes]
        table = SpaceTable(candidates, self._request.model, self._request)
        measured: dict[Component, ComponentMeasurement] = {}
        for row, size in enumerate(micro_batch_sizes):
            plan = TrialPlan(
                number=row,
                kind=TrialKind.COMPONENTS,
                model=self._request.model,
                candidate=candidates[row],
                components=tuple(c for c in table.decompositions[row].components if c not in measured),
                timeout_seconds=TIMEOUT_SECONDS,
            )
            if size in todo["composed"] and self._may("composed", size):
                found = profiler.measure(plan)
                measured |= {m.component: m for m in found.components}
                well = found.outcome is Outcome.OK
                figures = self._compose(table, row, measured) if well else {"reason": found.reason}
                self._add("composed", size, {"outcome": found.outcome.value, **figures})
            if size in todo["whole"] and self._may("whole", size):
                whole = profiler.measure(plan.model_copy(update={"kind": TrialKind.WHOLE_MODEL, "components": ()}))
                timed = whole.whole_model.model_dump(mode="json") if whole.whole_model else {"reason": whole.reason}
                self._add("whole", size, {"outcome": whole.outcome.value, **timed})

    def _compose(
        self, table: SpaceTable, row: int, measured: Mapping[Component, ComponentMeasurement]
    ) -> dict[str, Any]:
        """The measured components added up, as the product adds them up."""
        hardware, rows = self._report.hardware, np.array([row])
        figures = arrays_of(table, measured, host_is_device=hardware.device_kind == "cpu")
        device, host = figures.device_seconds[None, :], figures.host_seconds
        activations = np.add(*table.activation_bytes(*figures.sizes))[row]
        return {
            "micro_step_seconds": float(table.micro_step_seconds(device, host, rows)[0, 0]),
            "optimizer_seconds": float(table.optimizer_seconds(device, host, rows)[0, 0]),
            "peak_bytes": int(table.static_bytes_C[row] + activations),
        }

    def _candidate(self, micro_batch_size: int) -> Candidate:
        """Nothing tiled or recomputed, torch's default attention, and the experts that transformers is asked for."""
        moe = self._request.model.moe
        usable = {support.name for support in self._report.expert_backends if support.usable}
        return Candidate(
            micro_batch_size=micro_batch_size,
            attention_backend=self._report.default_attention,
            expert_backend=None if moe is None else EXPERTS if EXPERTS in usable else self._report.default_experts,
            num_query_groups=self._request.model.query_groups,
        )

    def _missing(self, side: str, micro_batch_sizes: list[int]) -> list[int]:
        done = {row["micro_batch_size"] for row in self.rows if row["name"] == self._name and row["side"] == side}
        return [size for size in micro_batch_sizes if size not in done]

    def _may(self, side: str, size: int) -> bool:
        """Whether there is time, and no smaller micro-batch that was too large; the latter is a row."""
        if time.monotonic() > self._deadline:
            print(f"{self._name}: no time for {side} at micro-batch {size}", flush=True)
            return False
        too_large = [
            row["micro_batch_size"]
            for row in self.rows
            if (row["name"], row["side"], row["outcome"]) == (self._name, side, Outcome.OUT_OF_MEMORY)
        ]
        if not too_large or size < min(too_large):
            return True
        reason = f"micro-batch {min(too_large)} was too large"
        self._add(side, size, {"outcome": Outcome.OUT_OF_MEMORY.value, "reason": reason})
        return False

    def _add(self, side: str, size: int, found: dict[str, Any]) -> None:
        row = {"name": self._name, "side": side, "micro_batch_size": size, **found}
        if found["outcome"] == Outcome.OK:
            step = combine_seconds(
                found["micro_step_seconds"], found["optimizer_seconds"], size, self._request.model, self._request
            )
            row["tokens_per_second"] = step.tokens_per_second
        if self._request.model.moe is not None:
            row.setdefault("experts", self._candidate(size).expert_backend)
            row["imbalance"] = self._imbalance(size)
        self.rows.append(row)
        self._keep()
        print(describe(row), flush=True)

    def _imbalance(self, size: int) -> float:
        """Tokens of the busiest expert over the mean, as the product draws its routes."""
        model = self._request.model
        assert model.moe is not None
        cpu = torch.device("cpu")
        routes = device_routes(model, self._request.routing, size * model.seq_length, self._request.seed, cpu)
        counts = torch.bincount(routes.flatten(), minlength=model.moe.num_experts)
        return float(counts.max()) * model.moe.num_experts / routes.numel()


def describe(row: dict[str, Any]) -> str:
    """One line."""
    head = f"{row['name']:<16} m={row['micro_batch_size']:<3} {row['side']:<13}"
    if row["outcome"] != Outcome.OK:
        return f"{head}{row['outcome']}: {row['reason']}"
    peak, imbalance, own = row.get("peak_bytes"), row.get("imbalance"), row.get("own_imbalance")
    return (
        f"{head}micro-step {1e3 * row['micro_step_seconds']:9.2f} ms, optimizer {1e3 * row['optimizer_seconds']:7.2f} "
        f"ms, {row['tokens_per_second']:9.0f} tokens/s"
        + (f", peak {peak / 2**30:.2f} GiB" if peak else "")
        + (f", {row['experts']}, busiest expert {imbalance:.2f}x the mean" if imbalance else "")
        + (f" ({own:.2f}x by its own router)" if own else "")
    )


def print_curves(summary: dict[str, Any]) -> None:
    """Relative throughput by side, and how far the product's curves are from transformers'."""
    for name, found in summary.items():
        print(f"{name}: tokens/s relative to micro-batch {found['base_micro_batch_size']}")
        for side, curve in found["curves"].items():
            points = ", ".join(f"{size}: {relative:.3f}" for size, relative in curve.items())
            print(f"  {side:<13} {points}; best {found['best'][side]}")
        for side, against in found["against_transformers"].items():
            print(
                f"  {side}: at most {against['max_deviation']:.1%} from transformers' curve; its best micro-batch "
                f"loses {against['loss_at_best']:.1%} there"
            )


def _fresh(report: DeviceReport) -> dict[str, Any]:
    return {
        "environment": describe_environment(),
        "transformers": version("transformers"),
        "hardware": report.hardware.model_dump(mode="json"),
        "training": TRAINING.model_dump(mode="json"),
        "rows": [],
    }


if __name__ == "__main__":
    sys.exit(main())
