"""Batch tiling on attention: what it gives a mixture-of-experts model, against a dense one of the same active FLOPs.

    python -m benchmarks.bta --device cuda:0 --out results/NAME.json

For every number of experts and top_k, all components of the space below are measured on the device, once each, and
shared where models have them in common (the attention, the head). Throughput at a memory limit is then that of the
best composed candidate that fits: without tiling and recomputation, with tiling, and as `explore` recommends when it
is given these measurements as its device. Each is relative to the dense model (FFN of top_k times the expert's width)
at its own best micro-batch under the same limit and the same means. Training state is sharded over `--num-devices`
(ZeRO-3); communication is not in the time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import describe_environment, write_results
from explorer.belief import Belief
from explorer.candidates import Candidate, Recompute
from explorer.components import Component
from explorer.hardware import DeviceReport
from explorer.measurements import ComponentMeasurement, Measurement, Outcome
from explorer.requests import ExplorationRequest
from explorer.search import explore
from explorer.space import enumerate_candidates
from explorer.table import SpaceTable
from explorer.trials import TrialKind, TrialPlan
from workers.launcher import Profiler

NUM_EXPERTS = (8, 16, 32, 64, 128)
TOP_K = (1, 2, 4, 8)
LIMITS_GIB = (40, 80, 132)
MICRO_BATCH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
TILES = (1, 2, 4, 8, 16)
TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Means:
    """Which candidates a column may choose from."""

    name: str
    allows: Callable[[Candidate], bool]


MEANS = (
    Means("plain", lambda c: c.bta_tile is None and c.recompute is Recompute.NONE),
    Means("tiled", lambda c: c.recompute is Recompute.NONE),
    Means("all", lambda _: True),
)


def main(arguments: list[str] | None = None) -> int:
    """Measure, compose and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--attention", default=None, help="back end; default: what torch's SDPA picks")
    parser.add_argument("--experts", nargs="+", default=["grouped_mm"])
    parser.add_argument("--num-experts", type=int, nargs="+", default=list(NUM_EXPERTS))
    parser.add_argument("--top-k", type=int, nargs="+", default=list(TOP_K))
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--expert-ffn-hidden-size", type=int, default=1408)
    parser.add_argument("--num-layers", type=int, default=16)
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--num-devices", type=int, default=64)
    parser.add_argument("--max-micro-batch-size", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=540.0, help="stop measuring after this time")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    bench = Bench(options)
    try:
        for top_k in options.top_k:
            bench.add(None, top_k)
            for num_experts in options.num_experts:
                if bench.expired:
                    break
                bench.add(num_experts, top_k)
                write_results(options.out, bench.results())
    finally:
        bench.close()
    write_results(options.out, bench.results())
    print_table(bench.results()["rows"])
    return 0


class Bench:
    """Measures models and keeps every component that any of them has had measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._deadline = time.monotonic() + options.seconds
        self._profiler = Profiler(options.device)
        self._shared: dict[Component, ComponentMeasurement] = {}
        self._report: DeviceReport | None = None
        self._dense: dict[int, dict[str, dict[str, Any]]] = {}
        self.rows: list[dict[str, Any]] = []
        self._profiler.start()

    @property
    def expired(self) -> bool:
        """Whether no further model should be measured."""
        return bool(time.monotonic() > self._deadline)

    def close(self) -> None:
        """End the profiler."""
        self._profiler.close()

    def results(self) -> dict[str, Any]:
        """Everything so far, as JSON."""
        shape = {name: value for name, value in vars(self._options).items() if name not in {"out", "seconds"}}
        hardware = self._report.hardware.model_dump(mode="json") if self._report else None
        return {"environment": describe_environment(), "hardware": hardware, "shape": shape, "rows": self.rows}

    def add(self, num_experts: int | None, top_k: int) -> None:
        """Measure one model; the dense one of a top_k comes first, without experts."""
        request = self._request(num_experts, top_k)
        report = self._profiler.begin(request)
        self._report = report
        table = self._table(request, report)
        own: dict[Component, ComponentMeasurement] = {}
        failed: dict[Component, str] = {}
        for component in table.components:
            if component in self._shared:
                own[component] = self._shared[component]
                continue
            row = int(np.flatnonzero(table.uses_CK[:, table.column[component]])[0])
            found = self._profiler.measure(self._plan(request, table.candidates[row], component))
            if found.outcome is Outcome.OK:
                own[component] = found.components[0]
                if component.kind.value in {"attention", "embedding", "head"}:
                    self._shared[component] = found.components[0]
            else:
                failed[component] = f"{found.outcome}: {found.reason}"
        best = self._best(request, report, table, own)
        name = "dense" if num_experts is None else f"E={num_experts}"
        if num_experts is None:
            self._dense[top_k] = best
        relative = {
            key: found["tokens_per_second"] / self._dense[top_k][key]["tokens_per_second"]
            for key, found in best.items()
            if found and self._dense[top_k].get(key)
        }
        self.rows.append(
            {
                "num_experts": num_experts,
                "top_k": top_k,
                "best": best,
                "relative_to_dense": relative,
                "failed": {component.key: reason for component, reason in failed.items()},
                "components": [m.model_dump(mode="json") for c, m in own.items() if c not in self._shared],
            }
        )
        print(f"{name} top_k={top_k}: " + ", ".join(f"{k} {v:.2f}" for k, v in relative.items()), flush=True)

    def _best(
        self,
        request: ExplorationRequest,
        report: DeviceReport,
        table: SpaceTable,
        own: dict[Component, ComponentMeasurement],
    ) -> dict[str, dict[str, Any]]:
        """For each limit and means, the best candidate that is measured and fits."""
        best: dict[str, dict[str, Any]] = {}
        for limit in LIMITS_GIB:
            limited = request.model_copy(update={"memory_limit_gib": float(limit)})
            for means in MEANS:
                allowed = [c for c in table.candidates if means.allows(c)]
                belief = Belief(SpaceTable(allowed, request.model, limited), allowed, limited, report.hardware)
                belief.learn([Measurement(candidate=allowed[0], outcome=Outcome.OK, components=tuple(own.values()))])
                verdict = belief.recommend()
                best[f"{limit}GiB/{means.name}"] = _describe(belief, verdict.row) if verdict else {}
            best[f"{limit}GiB/explored"] = self._explored(limited, report, own)
        return best

    def _explored(
        self, request: ExplorationRequest, report: DeviceReport, own: dict[Component, ComponentMeasurement]
    ) -> dict[str, Any]:
        """What the search recommends when these measurements are its device; its space is the same."""

        def replay(plan: TrialPlan) -> Measurement:
            missing = [c for c in plan.components if c not in own]
            outcome = Outcome.UNSUPPORTED if missing else Outcome.OK
            return Measurement(
                candidate=plan.candidate,
                outcome=outcome,
                reason="not recorded" if missing else None,
                failed_component=missing[0] if missing else None,
                components=tuple(own[c] for c in plan.components if c in own),
            )

        answer, num_trials = None, 0
        for step in explore(request, report, replay):
            num_trials += step.trial is not None
            answer = step.answer or answer
        found = answer.recommendation if answer else None
        if found is None:
            return {}
        return {
            "candidate": found.candidate.model_dump(mode="json"),
            "tokens_per_second": found.tokens_per_second,
            "peak_bytes": found.measured_peak_bytes,
            "confidence": found.confidence,
            "num_trials": num_trials,
        }

    def _table(self, request: ExplorationRequest, report: DeviceReport) -> SpaceTable:
        space = enumerate_candidates(request, report, request.model)
        return SpaceTable(space.candidates, request.model, request)

    def _plan(self, request: ExplorationRequest, candidate: Candidate, component: Component) -> TrialPlan:
        return TrialPlan(
            number=0,
            kind=TrialKind.COMPONENTS,
            model=request.model,
            candidate=candidate,
            components=(component,),
            timeout_seconds=TIMEOUT_SECONDS,
        )

    def _request(self, num_experts: int | None, top_k: int) -> ExplorationRequest:
        o = self._options
        model: dict[str, Any] = {
            "name": f"dense-k{top_k}" if num_experts is None else f"moe-e{num_experts}-k{top_k}",
            "num_layers": o.num_layers,
            "hidden_size": o.hidden_size,
            "num_attention_heads": o.hidden_size // 128,
            "vocab_size": 32768,
            "seq_length": o.seq_length,
        }
        if num_experts is None:
            model["ffn_hidden_size"] = top_k * o.expert_ffn_hidden_size
        else:
            model["moe"] = {
                "num_experts": num_experts,
                "top_k": top_k,
                "expert_ffn_hidden_size": o.expert_ffn_hidden_size,
            }
        sizes = [m for m in MICRO_BATCH_SIZES if m <= o.max_micro_batch_size]
        request: dict[str, Any] = {
            "model": model,
            "micro_batch_size": sizes,
            "bta": {"tiles": [tile for tile in TILES if any(m % tile == 0 for m in sizes)]},
            "recompute": ["none", "selective", "partial_50", "full"],
            "num_devices": o.num_devices,
            "batch_size": 32 * o.num_devices,
            "training": {"sharding": "zero3"},
            "verify": False,
        }
        if num_experts is not None:
            request["expert_backends"] = o.experts
        if o.attention is not None:
            request["attention_backends"] = [o.attention]
        elif self._report is not None:
            request["attention_backends"] = [self._report.default_attention]
        else:
            first = ExplorationRequest.model_validate(request)
            self._report = self._profiler.begin(first)
            request["attention_backends"] = [self._report.default_attention]
        return ExplorationRequest.model_validate(request)


def _describe(belief: Belief, row: int) -> dict[str, Any]:
    return {
        "candidate": belief.table.candidates[row].model_dump(mode="json"),
        "tokens_per_second": belief.seconds(row).tokens_per_second,
        "peak_bytes": belief.bytes(row).peak,
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    """Throughput relative to dense: plain / tiled / explored, a line a model, a column a limit."""
    print(f"{'':<16}" + "".join(f"{f'{limit} GiB':>24}" for limit in LIMITS_GIB))
    for row in rows:
        if row["num_experts"] is None:
            continue
        cells = []
        for limit in LIMITS_GIB:
            found = [row["relative_to_dense"].get(f"{limit}GiB/{m}") for m in ("plain", "tiled", "explored")]
            cells.append(" / ".join("-" if f is None else f"{f:.2f}" for f in found))
        label = f"E={row['num_experts']} k={row['top_k']}"
        print(f"{label:<16}" + "".join(f"{cell:>24}" for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
