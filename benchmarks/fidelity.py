"""Composed steps against whole models: the error of a sum of components.

    python -m benchmarks.fidelity examples/llama-3.2-1b.yaml ... --device cuda:0 --out results/NAME.json

For each configuration, candidates over micro-batch, tile and recomputation are measured by component, composed, and
then run whole: all layers, embedding, loss, accumulated micro-steps, communication, and the optimizer. Errors are
(composed - whole) / whole. On several devices (`--device cuda:0-3`) plain candidates are checked with every level of
sharding, or with those that `--sharding` names.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.environment import describe_environment, write_results
from bexp.explorer.cost_model.collectives import is_communication_timed
from bexp.explorer.cost_model.components import Component
from bexp.explorer.cost_model.composition import Composition
from bexp.explorer.formats.document import load_document
from bexp.explorer.formats.request import parse_request
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import Outcome
from bexp.explorer.records.trial import Trial, TrialKind, TrialTask, count_processes
from bexp.explorer.search.posterior import Posterior
from bexp.explorer.search.whole_model_check import check_whole_model
from bexp.explorer.spec.candidate import Candidate, Recompute
from bexp.explorer.spec.request import ExplorationRequest
from bexp.workers.devices.selection import parse_devices
from bexp.workers.process.profiler import Profiler

TIMEOUT_SECONDS = 180.0


def main(arguments: list[str] | None = None) -> int:
    """Check every configuration and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("configs", nargs="+", type=Path)
    parser.add_argument("--device", default="cuda:0", help="one, or as many as train together")
    parser.add_argument("--sharding", nargs="+", help="levels of it on several devices; default: all")
    parser.add_argument("--num-layers", type=int, help="of the models, instead of their own")
    parser.add_argument("--micro-batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    for path in options.configs:
        document = load_document(path.read_text())
        devices = parse_devices(options.device)
        if len(devices) > 1:
            training = (document.get("training") or {}) | {"sharding": options.sharding or "explore"}
            document |= {"num_devices": len(devices), "training": training}
        request = parse_request(document)
        if options.num_layers is not None:
            shorter = request.shapes.model_copy(update={"num_layers": options.num_layers})
            request = request.model_copy(update={"model": shorter})
        profiler = Profiler(devices)
        try:
            profiler.start()
            rows += check(path.stem, request, profiler, options.micro_batch_sizes)
        finally:
            profiler.close()
        results = {
            "environment": describe_environment(),
            "hardware": rows[0]["hardware"] if rows else None,
            "rows": rows,
        }
        write_results(options.out, results)
    print_table(rows)
    return 0


def candidates(request: ExplorationRequest, report: DeviceReport, micro_batch_sizes: list[int]) -> list[Candidate]:
    """Return each micro-batch plain, with every level of sharding.

    If there is only one level, the largest is also returned tiled, and with selective, partial and full recomputation.
    """
    model = request.shapes
    plain = {
        "attention_backend": report.default_attention,
        "expert_backend": report.default_experts,
        "num_query_groups": model.query_groups,
    }
    levels = request.space.sharding_choices
    every = [Candidate(micro_batch_size=m, sharding=level, **plain) for level in levels for m in micro_batch_sizes]
    largest = max(micro_batch_sizes)
    if request.mode == "train" and levels == (None,):
        policies = (Recompute.SELECTIVE, Recompute.PARTIAL_50, Recompute.FULL)
        every += [Candidate(micro_batch_size=largest, recompute=policy, **plain) for policy in policies]
        every.append(Candidate(micro_batch_size=largest, bta_tile=max(1, largest // 4), **plain))
    return every


def check(
    name: str, request: ExplorationRequest, profiler: Profiler, micro_batch_sizes: list[int]
) -> list[dict[str, Any]]:
    """Measure, compose and run every candidate of one configuration that fits."""
    report = profiler.begin(request)
    chosen = candidates(request, report, micro_batch_sizes)
    table = Composition(chosen, request.shapes, request, communicates=is_communication_timed(request, report.hardware))
    state = Posterior.of(table, chosen, request, report.hardware)
    rows = []
    for row, candidate in enumerate(chosen):
        missing = table.missing(row, state.surrogate.known_K)
        together = tuple(c for c in missing if c in table.communications)  # separate trials, as in an exploration
        for components in (together, tuple(c for c in missing if c not in together)):
            if components:
                state.knowledge.learn(0, profiler.measure(_plan(row, candidate, components, request, report)))
        if not (state.is_known(row) and state.fits(row)):
            print(f"{name}: {candidate.describe()}: does not fit", flush=True)
            continue
        whole = profiler.measure(_plan(row, candidate, None, request, report))
        trial = Trial(number=row, kind=TrialKind.WHOLE_MODEL, measurement=whole)
        checked = check_whole_model(state, row, trial)
        seconds = state.seconds(row)
        entry = {
            "name": name,
            "candidate": candidate.model_dump(mode="json"),
            "hardware": report.hardware.model_dump(mode="json"),
            "outcome": whole.outcome.value,
            "reason": whole.reason,
            "composed": {
                "micro_step_seconds": seconds.micro_step,
                "optimizer_seconds": seconds.optimizer,
                "communication_seconds": seconds.communication if table.communications else None,
                "peak_bytes": state.bytes(row).peak,
                "required_bytes": state.bytes(row).required,
            },
            "components": [
                state.knowledge.measured[c].model_dump(mode="json") for c in table.decompositions[row].components
            ],
            "check": checked.model_dump(mode="json") if checked else None,
        }
        rows.append(entry)
        _print_row(entry)
    return rows


def _plan(
    number: int,
    candidate: Candidate,
    components: tuple[Component, ...] | None,
    request: ExplorationRequest,
    report: DeviceReport,
) -> TrialTask:
    """Measure these components, or the whole model if there are none."""
    kind = TrialKind.WHOLE_MODEL if components is None else TrialKind.COMPONENTS
    return TrialTask(
        number=number,
        kind=kind,
        model=request.shapes,
        candidate=candidate,
        components=components or (),
        num_processes=count_processes(kind, candidate, components or (), request, report.hardware),
        timeout_seconds=TIMEOUT_SECONDS,
    )


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the median and the largest error."""
    checked = [row["check"] for row in rows if row["outcome"] == Outcome.OK]
    for what in ("step_error", "peak_error"):
        errors = [abs(check[what]) for check in checked]
        if errors:
            print(
                f"{what}: median {statistics.median(errors):.1%}, max {max(errors):.1%} over {len(errors)} candidates"
            )


def _print_row(entry: dict[str, Any]) -> None:
    candidate = Candidate.model_validate(entry["candidate"])
    check = entry["check"]
    if check is None:
        print(f"{entry['name']}: {candidate.describe()}: {entry['outcome']}: {entry['reason']}", flush=True)
        return
    whole = check["measurement"]
    print(
        f"{entry['name']}: {candidate.describe()}: micro-step {1e3 * entry['composed']['micro_step_seconds']:.1f} ms "
        f"composed, {1e3 * whole['micro_step_seconds']:.1f} whole; optimizer "
        f"{1e3 * entry['composed']['optimizer_seconds']:.2f}, {1e3 * whole['optimizer_seconds']:.2f} ms; "
        f"communication of the step {1e3 * (entry['composed']['communication_seconds'] or 0):.1f}, of the whole model "
        f"beyond its micro-steps {1e3 * (whole['communication_seconds'] or 0):.1f} ms; "
        f"step {check['step_error']:+.1%}, peak {check['peak_error']:+.1%}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
