"""Composed steps on meshes of devices against whole models on the same devices.

    python -m benchmarks.mesh_fidelity --devices cuda:0-1 --out benchmarks/results/NAME.json
    python -m benchmarks.mesh_fidelity examples/mesh-tiny.yaml --devices cpu,cpu --out /tmp/mesh.json

All devices share each layer (tensor parallelism), are the ranks of a pipeline (1F1B and interleaved), or share the
experts, in each mode. For each model, mesh and micro-batch the exchanges and the blocks of a device are measured, the
step is composed of them, and the model is run whole on the devices. Errors are (composed - whole) / whole; the peak is
that of the fullest rank. The file is written after each row, and a second start runs what it lacks.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.environment import begin, describe_environment, write_results
from bexp.explorer.cost.components import Component
from bexp.explorer.dimensions.expert_modes import ExpertMode
from bexp.explorer.formats.document import load_document
from bexp.explorer.formats.request import parse_request
from bexp.explorer.meshes.check import MeshChecks
from bexp.explorer.meshes.knowledge import MeshKnowledge
from bexp.explorer.meshes.layers import MeshCandidate
from bexp.explorer.meshes.mesh import MeshRun
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import ComponentMeasurement, Measurement, Outcome
from bexp.explorer.records.trial import Trial, TrialKind, TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.measure.device_names import parse_devices
from bexp.workers.process.interface import DeviceProfiler
from bexp.workers.process.profiler import Profiler

CONFIGS = ("examples/gpt2-124m.yaml", "examples/llama-3.2-1b.yaml", "examples/qwen3-30b-a3b.yaml")
COMPONENT_FIELDS = {
    *("device_seconds", "forward_device_seconds", "host_seconds", "waiting_forward_seconds"),
    *("together_forward_seconds", "together_backward_seconds", "together_host_backward_seconds"),
    *("saved_bytes", "forward_peak_bytes", "backward_peak_bytes"),
}
"""What a row tells of each component."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every row that the file lacks; 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("configs", nargs="*", type=Path, default=[Path(config) for config in CONFIGS])
    parser.add_argument("--devices", default="cuda:0-1")
    parser.add_argument("--micro-batch-sizes", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--num-micro-batches", type=int, default=8, help="of a step; a multiple of the devices")
    parser.add_argument("--timeout-seconds", type=float, default=300.0, help="of each trial")
    parser.add_argument("--most-layers", type=int, default=8, help="models with more layers are cut to so many")
    parser.add_argument("--meshes", type=re.compile, default=re.compile(""), help="a pattern of the names to run")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    devices = parse_devices(options.devices)
    setup = {"num_micro_batches": options.num_micro_batches, "most_layers": options.most_layers}
    with Profiler(devices) as profiler:
        hardware = profiler.hardware().model_dump(mode="json")
        fresh = {"environment": describe_environment(), "hardware": hardware, "setup": setup, "rows": []}
        try:
            results = begin(options.out, fresh, same=("setup",))
        except ValueError as error:
            parser.error(str(error))
        for row in rows(options, len(devices), profiler, results["rows"]):
            results["rows"].append(row)
            write_results(options.out, results)
            print(line(row), flush=True)
    return int(any(row["outcome"] not in (Outcome.OK, Outcome.UNSUPPORTED) for row in results["rows"]))


def meshes(number: int, *, with_experts: bool) -> dict[str, dict[str, Any]]:
    """Return the meshes of so many devices by name; of a mode with a choice, formulas choose."""
    modes = {f"EP={number} {mode}": {"expert": number, "expert_mode": mode, "sharding": "none"} for mode in ExpertMode}
    pipeline = {"pipeline": number, "sharding": "none"}
    return {
        f"TP={number}": {"tensor": number},
        f"PP={number} 1F1B": {**pipeline, "schedule": "1f1b"},
        f"PP={number} interleaved": {**pipeline, "schedule": "interleaved", "virtual_stages": 2},
        **(modes if with_experts else {}),
    }


def rows(
    options: argparse.Namespace, number: int, profiler: DeviceProfiler, known: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    done = {(row["model"], row["mesh"], row["micro_batch_size"]) for row in known}
    for path in options.configs:
        model = parse_request(load_document(path.read_text())).model
        assert model is not None, "the configuration describes a model"
        layers = min(model.num_layers, options.most_layers)
        measured: dict[Component, ComponentMeasurement] = {}
        for name, parallelism in meshes(number, with_experts=model.moe is not None).items():
            for m in options.micro_batch_sizes:
                if (path.stem, name, m) in done or not options.meshes.search(name):
                    continue
                request = ExplorationRequest.model_validate(
                    {
                        "model": model.model_copy(update={"num_layers": layers}),
                        "num_devices": number,
                        "device_kind": profiler.hardware().device_kind,
                        "batch_size": m * options.num_micro_batches,
                        "micro_batch_size": m,
                        "recompute": ["none"],
                        "parallelism": parallelism,
                    }
                )
                row = {"model": path.stem, "num_layers": layers, "mesh": name, "micro_batch_size": m}
                report = profiler.begin(request)
                yield row | measure(request, report, profiler, measured, options.timeout_seconds)


def measure(
    request: ExplorationRequest,
    report: DeviceReport,
    profiler: DeviceProfiler,
    measured: dict[Component, ComponentMeasurement],
    timeout_seconds: float,
) -> dict[str, Any]:
    """Return the composed and the whole step of a request with one candidate.

    `measured` has the components of earlier rows of the model, and gets those of this one.
    """
    space = MeshKnowledge(request, report)
    space.learn(measured.values())
    fastest = max(space.candidates, key=lambda each: space.step(each).tokens_per_second)

    def run(kind: TrialKind, components: Sequence[Any] = (), mesh_run: MeshRun | None = None) -> Measurement:
        return profiler.measure(
            TrialTask(
                number=0,
                kind=kind,
                model=request.shapes,
                candidate=fastest.candidate,
                components=tuple(components),
                timeout_seconds=timeout_seconds,
                num_processes=request.num_devices,
                shared_run=mesh_run,
            )
        )

    moments = [time.perf_counter()]
    transfers = tuple(each for each in space.transfers if each not in measured)
    for components in (transfers, space.missing(fastest)):
        measurement = run(TrialKind.COMPONENTS, components)
        if measurement.outcome is not Outcome.OK:
            return {"outcome": measurement.outcome, "reason": measurement.reason}
        space.learn(measurement.components)
        measured |= {each.component: each for each in measurement.components}
        moments.append(time.perf_counter())
    checks = MeshChecks(space)
    mesh_run = checks.run_of(fastest, space.step(fastest, simulate=True))
    measurement = run(TrialKind.WHOLE_MODEL, mesh_run=mesh_run)
    moments.append(time.perf_counter())
    trial = Trial(number=0, kind=TrialKind.WHOLE_MODEL, measurement=measurement, shared_run=mesh_run)
    checks.learn((trial,))
    return {
        "outcome": measurement.outcome,
        "reason": measurement.reason,
        "seconds": dict(zip(("exchanges", "blocks", "whole"), (b - a for a, b in pairwise(moments)), strict=True)),
        "conditions": None if measurement.contamination is None else measurement.contamination,
        "components": [
            {"key": component.key, **space.measured[component].model_dump(include=COMPONENT_FIELDS)}
            for component in (*space.transfers, *space.composer.components(fastest))
        ],
        **compared(space, fastest, checks, mesh_run),
    }


def compared(space: MeshKnowledge, mesh_candidate: MeshCandidate, checks: MeshChecks, run: MeshRun) -> dict[str, Any]:
    """Return the figures of a row; only the composed ones if the whole model failed."""
    step = space.step(mesh_candidate, simulate=True, run=run)
    figures: dict[str, Any] = {
        "mesh_run": run.model_dump(mode="json"),
        "composed_step_seconds": step.seconds,
        "composed_optimizer_seconds": step.optimizer_seconds,
        "composed_peak_bytes": step.memory.total,
        "bubble_share": step.bubble_share,
        "exchange_share": step.exchange_share,
    }
    check = checks.of(mesh_candidate)
    if check is None:
        return figures
    whole = check.measurement
    return figures | {
        "whole_step_seconds": whole.shared_step_seconds,
        "whole_optimizer_seconds": whole.optimizer_seconds,
        "whole_peak_bytes": whole.peak_bytes,
        "step_error": check.step_error,
        "peak_error": check.peak_error,
        "standard_error_seconds": run.num_micro_batches * whole.standard_error_seconds,
    }


def line(row: dict[str, Any]) -> str:
    name = f"{row['model']:<20} {row['mesh']:<18} m={row['micro_batch_size']:<3}"
    if "step_error" not in row:
        return f"{name} {row['outcome']}: {row['reason']}"
    return (
        f"{name} composed {1e3 * row['composed_step_seconds']:9.1f} ms, "
        f"whole {1e3 * row['whole_step_seconds']:9.1f} ms ({row['step_error']:+.1%}), peak {row['peak_error']:+.1%}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
