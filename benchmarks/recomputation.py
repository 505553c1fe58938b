"""The memory that each recomputation policy frees, and the time that it costs, model by model.

    python -m benchmarks.recomputation examples/llama-3.2-1b.yaml examples/olmoe-1b-7b.yaml --device cuda:0 \\
        --micro-batch-size 4 --experts grouped_mm fused --out benchmarks/results/NAME.json

The time and the memory of every block are measured once under each of its settings, and composed. The results are the
bytes that a layer keeps between forward and backward, averaged over the layers, and the seconds of a micro-step. Both
are relative to no recomputation with the same kernels. Batch tiling on attention is listed with the policies, because
it recomputes as well. The optimizer is not in the time. Whether the composed step would fit the device is not checked.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import describe_environment, write_results
from bexp.explorer.cost_model.candidate_table import SpaceTable, output_bytes_per_token
from bexp.explorer.cost_model.components import Component, ComponentKind
from bexp.explorer.cost_model.decomposition import Decomposition
from bexp.explorer.formats.document import load_document
from bexp.explorer.formats.request import parse_request
from bexp.explorer.records.measurement import ComponentMeasurement, Outcome
from bexp.explorer.records.trial import Measure, TrialKind, TrialPlan
from bexp.explorer.spec.candidate import Candidate
from bexp.explorer.spec.hardware import DeviceReport
from bexp.explorer.spec.request import ExplorationRequest
from bexp.workers.process.profiler import Profiler

TIMEOUT_SECONDS = 120.0
MIB = 1 << 20


def main(arguments: list[str] | None = None) -> int:
    """Measure, compose, print and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("configs", nargs="+", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--tiles", type=int, nargs="*", default=[1])
    parser.add_argument("--attention", help="back end; default: what torch's SDPA picks")
    parser.add_argument("--experts", nargs="+", help="back ends; default: what the base candidate uses")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    results: dict[str, Any] = {"environment": describe_environment(), "hardware": None, "rows": [], "components": []}
    for path in options.configs:
        request = parse_request(load_document(path.read_text())).model_copy(update={"recompute": None})
        profiler = Profiler(options.device)
        try:
            profiler.start()
            report = profiler.begin(request)
            results["hardware"] = report.hardware.model_dump(mode="json")
            measured: dict[Component, ComponentMeasurement] = {}
            failed: dict[Component, str] = {}
            for backend in experts_of(request, report, options.experts):
                attention = options.attention or report.default_attention
                chosen = candidates(request, options.micro_batch_size, options.tiles, attention, backend)
                table = SpaceTable(chosen, request.model, request)
                measure(table, profiler.measure, measured, failed)
                rows = compose(table, measured, failed)
                results["rows"] += [{"name": path.stem, **row} for row in rows]
                print_table(path.stem, rows)
                write_results(options.out, results)
            results["components"] += [{"name": path.stem, **m.model_dump(mode="json")} for m in measured.values()]
        finally:
            profiler.close()
        write_results(options.out, results)
    return 0


def experts_of(request: ExplorationRequest, report: DeviceReport, asked: Sequence[str] | None) -> list[str | None]:
    """Return the expert back ends to compare. Those that do not serve the model are left out, with a message."""
    if request.model.moe is None:
        return [None]
    reasons = {support.name: support.reason for support in report.expert_backends}
    for name in asked or ():
        if reasons.get(name, "there is no back end of this name") is not None:
            print(f"{name}: {reasons.get(name, 'there is no back end of this name')}", flush=True)
    usable = [support.name for support in report.expert_backends if support.usable]
    wanted = tuple(asked) if asked else (report.default_experts,)
    return [name for name in usable if name in wanted]


def candidates(
    request: ExplorationRequest, micro_batch_size: int, tiles: Sequence[int], attention: str, experts: str | None
) -> list[Candidate]:
    """Return every policy untiled, the plain one first, then each tile with every policy that it allows."""
    return [
        Candidate(
            micro_batch_size=micro_batch_size,
            bta_tile=tile,
            recompute=policy,
            attention_backend=attention,
            expert_backend=experts,
            num_query_groups=request.model.query_groups,
        )
        for tile in (None, *(tile for tile in tiles if micro_batch_size % tile == 0))
        for policy in request.policies_for(tile)
    ]


def measure(
    table: SpaceTable,
    run: Measure,
    measured: dict[Component, ComponentMeasurement],
    failed: dict[Component, str],
) -> None:
    """Measure time and memory of the blocks of a micro-step that are in neither `measured` nor `failed`."""
    for component in table.components:
        if component in measured or component in failed or component.kind is ComponentKind.OPTIMIZER:
            continue
        user = int(np.flatnonzero(table.uses_CK[:, table.column[component]])[0])
        plan = TrialPlan(
            number=0,
            kind=TrialKind.COMPONENTS,
            model=table.model,
            candidate=table.candidates[user],
            components=(component,),
            timeout_seconds=TIMEOUT_SECONDS,
        )
        found = run(plan)
        if found.outcome is Outcome.OK:
            measured[component] = found.components[0]
        else:
            failed[component] = f"{found.outcome}: {found.reason}"


def compose(
    table: SpaceTable, measured: dict[Component, ComponentMeasurement], failed: dict[Component, str]
) -> list[dict[str, Any]]:
    """Return one row per candidate, relative to the first, which recomputes nothing."""

    def figures(name: str) -> np.ndarray:
        return np.array([float(getattr(measured[c], name)) if c in measured else np.nan for c in table.components])

    seconds_C = table.micro_step_seconds(figures("device_seconds")[None, :], figures("host_seconds"))[0]
    rows: list[dict[str, Any]] = []
    for i, candidate in enumerate(table.candidates):
        parts = table.decompositions[i]
        row: dict[str, Any] = {"candidate": candidate.model_dump(mode="json")}
        broken = [failed[c] for c in parts.components if c in failed]
        if broken:
            rows.append({**row, "reason": broken[0]})
            continue
        kept = layer_bytes(parts, measured, table)
        first = rows[0] if rows and "layer_bytes" in rows[0] else None
        row |= {"micro_step_seconds": float(seconds_C[i]), "layer_bytes": kept, "blocks": blocks(parts, measured)}
        if first is not None or i == 0:
            base = first or row
            row |= {
                "step_cost": row["micro_step_seconds"] / base["micro_step_seconds"] - 1,
                "bytes_share": row["layer_bytes"] / base["layer_bytes"],
            }
        rows.append(row)
    return rows


def layer_bytes(parts: Decomposition, measured: dict[Component, ComponentMeasurement], table: SpaceTable) -> float:
    """Return the bytes that a layer keeps for backward, on average. A layer recomputed as a whole keeps its output."""
    model = table.model
    assert parts.embedding is not None
    output = parts.embedding.micro_batch_size * model.seq_length * output_bytes_per_token(model)
    kept = 0
    for group in parts.layers:
        inside = sum(measured[block].saved_bytes for block in group.blocks)
        kept += group.layers.count * (output if group.layers.recomputed else inside)
    return kept / model.num_layers


def blocks(parts: Decomposition, measured: dict[Component, ComponentMeasurement]) -> dict[str, dict[str, float]]:
    """Seconds and bytes of the blocks of a layer, by the component's key."""
    found = {}
    for component in dict.fromkeys(c for group in parts.layers for c in group.blocks):
        result = measured[component]
        found[component.key] = {
            "device_seconds": result.device_seconds,
            "host_seconds": result.host_seconds,
            "saved_bytes": result.saved_bytes,
        }
    return found


def print_table(name: str, rows: list[dict[str, Any]]) -> None:
    """Print a line per policy: bytes of a layer, their share, and the cost of the step."""
    first = Candidate.model_validate(rows[0]["candidate"])
    experts = f" experts={first.expert_backend}" if first.expert_backend else ""
    print(f"{name} micro_batch_size={first.micro_batch_size} attention={first.attention_backend}{experts}")
    for row in rows:
        candidate = Candidate.model_validate(row["candidate"])
        label = candidate.recompute + (f", tile {candidate.bta_tile}" if candidate.bta_tile else "")
        if "reason" in row:
            print(f"  {label:<22} {row['reason']}", flush=True)
            continue
        share, cost = row.get("bytes_share", float("nan")), row.get("step_cost", float("nan"))
        print(
            f"  {label:<22} {row['layer_bytes'] / MIB:9.1f} MiB a layer {share:6.1%}   "
            f"{1e3 * row['micro_step_seconds']:9.2f} ms {cost:+7.1%}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
