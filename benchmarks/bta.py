"""Batch tiling on attention: what a mixture-of-experts model gains by it, relative to a dense model.

    python -m benchmarks.bta --device cuda:0 --out results/NAME.json

For every number of experts and top_k, all components of the space below are measured on the device once. Models share
the components that they have in common (attention, head). The throughput at a memory limit is that of the best composed
candidate that fits: without tiling and recomputation, with tiling, and as `explore` recommends if these measurements
are its device. It is by the clock: of the host's and the device's time the larger counts. The same candidate's
throughput on the device alone stands beside it. Each is relative to the dense model of the same active FLOPs (FFN of
top_k times the expert's width) at its own best micro-batch under the same limit and with the same choices. Training
state is sharded over `--num-devices` (ZeRO-3). Communication is not in the time.

If the file exists, the run continues it: its models are kept, and the missing ones are measured. `--reuse OTHER` takes
everything that does not depend on attention from another such file of the same shape and device, so that a table with
another attention back end needs only the attention measured.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bta_composition import DEVICE_RATE, LIMITS_GIB, add_device_rates, best_candidates, relative_rates
from benchmarks.continuation import begin, load_similar
from benchmarks.environment import describe_environment, write_results
from bexp.explorer.cost_model.candidate_table import SpaceTable
from bexp.explorer.cost_model.components import Component, ComponentKind
from bexp.explorer.cost_model.search_space import enumerate_candidates
from bexp.explorer.records.measurement import ComponentMeasurement, Outcome
from bexp.explorer.records.trial import TrialKind, TrialPlan
from bexp.explorer.spec.candidate import Candidate
from bexp.explorer.spec.hardware import DeviceReport, HardwareSpec
from bexp.explorer.spec.request import ExplorationRequest
from bexp.workers.process.profiler import Profiler

NUM_EXPERTS = (8, 16, 32, 64, 128)
TOP_K = (1, 2, 4, 8)
MICRO_BATCH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
TILES = (1, 2, 4, 8, 16)
TIMEOUT_SECONDS = 60.0
SHARED = {ComponentKind.ATTENTION, ComponentKind.EMBEDDING, ComponentKind.HEAD}
"""What these models have in common."""

REUSABLE = ("shape.attention", "shape.num_experts", "shape.top_k", "shape.max_micro_batch_size")
"""Fields in which a file may differ whose components are reused."""


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
    parser.add_argument("--reuse", type=Path, help="a file to take all but attention from")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.seconds
    with Profiler(options.device) as profiler:
        fresh = {
            "environment": describe_environment(),
            "hardware": profiler.hardware().model_dump(mode="json"),
            "shape": {name: value for name, value in vars(options).items() if name not in {"out", "seconds", "reuse"}},
            "rows": [],
            "shared": [],
        }
        other = None
        try:
            found = begin(options.out, fresh, same=("shape",))
            if options.reuse is not None:
                other = load_similar(options.reuse, fresh, same=("shape",), other=REUSABLE)
                found["reused"] = {"file": options.reuse.name, "continued": other.get("continued", [])}
        except ValueError as error:
            parser.error(str(error))
        bench = Bench(options, profiler, found)
        if other is not None:
            bench.reuse(other)
        if found["rows"]:
            print(f"{options.out}: {bench.count} are kept and not measured again")
        for num_experts, top_k in bench.missing():
            if time.monotonic() > deadline:
                break
            bench.add(num_experts, top_k, save=lambda: write_results(options.out, bench.results()))
            write_results(options.out, bench.results())
    print_table(found["rows"])
    left_out = ", ".join(map(_name, bench.left_out))
    print(f"{bench.count}" + (f", left out for want of time: {left_out}" if left_out else ""))
    return 0


class Bench:
    """Measures models, keeps every measured component, and fills `found`."""

    def __init__(self, options: argparse.Namespace, profiler: Profiler | None, found: dict[str, Any]) -> None:
        self._options = options
        self._profiler = profiler
        self._found = found
        self._report: DeviceReport | None = None
        shared = (ComponentMeasurement.model_validate(each) for each in found["shared"])
        self._shared = {measured.component: measured for measured in shared}
        self._dense = {row["top_k"]: row["best"] for row in self.rows if row["num_experts"] is None}
        self._reused: dict[tuple[int | None, int], dict[Component, ComponentMeasurement]] = {}

    @property
    def _device(self) -> Profiler:
        assert self._profiler is not None, "a bench that only compares again measures nothing"
        return self._profiler

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The results by model, dense models included."""
        rows: list[dict[str, Any]] = self._found["rows"]
        return rows

    @property
    def left_out(self) -> list[dict[str, Any]]:
        """The requested mixture-of-experts models that are not measured yet."""
        return [
            {"num_experts": num_experts, "top_k": top_k}
            for num_experts, top_k in self.missing()
            if num_experts is not None
        ]

    @property
    def count(self) -> str:
        """Say how many of the requested models are measured."""
        asked = len(self._options.num_experts) * len(self._options.top_k)
        return f"{asked - len(self.left_out)} of {asked} models"

    def missing(self) -> Iterator[tuple[int | None, int]]:
        """Number of experts and top_k of each model that is not measured; a dense one comes before its sparse ones."""
        done = {(row["num_experts"], row["top_k"]) for row in self.rows}
        for top_k in self._options.top_k:
            for num_experts in (None, *self._options.num_experts):
                if (num_experts, top_k) not in done:
                    yield num_experts, top_k

    def results(self) -> dict[str, Any]:
        """Everything so far, as JSON."""
        shared = [measured.model_dump(mode="json") for measured in self._shared.values()]
        return self._found | {"shared": shared, "left_out": self.left_out}

    def reuse(self, other: dict[str, Any]) -> None:
        """Take what `other` has measured of everything but attention."""

        def taken(measured: Iterable[dict[str, Any]]) -> dict[Component, ComponentMeasurement]:
            found = map(ComponentMeasurement.model_validate, measured)
            return {each.component: each for each in found if each.component.kind is not ComponentKind.ATTENTION}

        self._shared |= taken(other["shared"])
        self._reused = {(row["num_experts"], row["top_k"]): taken(row["components"]) for row in other["rows"]}

    def compare_again(self) -> None:
        """Compute the rates on the device alone, and what is relative to dense, again from the stored components."""
        hardware = HardwareSpec.model_validate(self._found["hardware"])
        for row in self.rows:
            stored = [ComponentMeasurement.model_validate(each) for each in row["components"]]
            attention = next(best["candidate"]["attention_backend"] for best in row["best"].values() if best)
            request = self._request(row["num_experts"], row["top_k"], attention)
            add_device_rates(row["best"], request, hardware, [*self._shared.values(), *stored])
        for row in self.rows:
            dense = self._dense[row["top_k"]]
            row["relative_to_dense"] = relative_rates(row["best"], dense)
            row["device_relative_to_dense"] = relative_rates(row["best"], dense, DEVICE_RATE)

    def add(self, num_experts: int | None, top_k: int, save: Callable[[], None]) -> None:
        """Measure one model; the dense one of a top_k comes first, without experts.

        Components that models share are saved as soon as they are measured, because with quadratic attention they take
        longer than all the rest.
        """
        request = self._request(num_experts, top_k)
        report = self._device.begin(request)
        self._report = report
        table = self._table(request, report)
        known = self._shared | self._reused.get((num_experts, top_k), {})
        own: dict[Component, ComponentMeasurement] = {}
        failed: dict[Component, str] = {}
        for component in table.components:
            if component in known:
                own[component] = known[component]
                continue
            row = int(np.flatnonzero(table.uses_CK[:, table.column[component]])[0])
            found = self._device.measure(self._plan(request, table.candidates[row], component))
            if found.outcome is Outcome.OK:
                own[component] = found.components[0]
                if component.kind in SHARED:
                    known[component] = self._shared[component] = found.components[0]
                    save()
            else:
                failed[component] = f"{found.outcome}: {found.reason}"
        best = best_candidates(request, report, table, own)
        if num_experts is None:
            self._dense[top_k] = best
        add_device_rates(best, request, report.hardware, own.values())
        relative = relative_rates(best, self._dense[top_k])
        model: dict[str, Any] = {
            "num_experts": num_experts,
            "top_k": top_k,
            "best": best,
            "relative_to_dense": relative,
            "device_relative_to_dense": relative_rates(best, self._dense[top_k], DEVICE_RATE),
            "failed": {component.key: reason for component, reason in failed.items()},
            "components": [m.model_dump(mode="json") for c, m in own.items() if c not in self._shared],
        }
        self.rows.append(model)
        print(f"{_name(model)}: " + ", ".join(f"{key} {value:.2f}" for key, value in relative.items()), flush=True)

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

    def _request(self, num_experts: int | None, top_k: int, attention: str | None = None) -> ExplorationRequest:
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
        if o.attention is not None or attention is not None:
            request["attention_backends"] = [attention or o.attention]
        elif self._report is not None:
            request["attention_backends"] = [self._report.default_attention]
        else:
            first = ExplorationRequest.model_validate(request)
            self._report = self._device.begin(first)
            request["attention_backends"] = [self._report.default_attention]
        return ExplorationRequest.model_validate(request)


def _name(model: dict[str, Any]) -> str:
    return ("dense" if model["num_experts"] is None else f"E={model['num_experts']}") + f" top_k={model['top_k']}"


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
        print(f"{_name(row):<16}" + "".join(f"{cell:>24}" for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
