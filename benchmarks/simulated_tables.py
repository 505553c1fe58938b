"""Recorded tables of simulated devices, for work on the search without a GPU.

    python -m benchmarks.simulated_tables examples/olmoe-1b-7b.yaml ... --out DIRECTORY [--seed N] [--device KIND]

The kernels of a smooth device have an efficiency over the roofline that saturates with the tokens they see, droops for
large ones and jumps by wave quantisation; back ends cross over; bytes are off the prediction by similar; whole models
differ from what their components add up to, partly together, partly each by itself. The ranges are those that H200
runs under results/ show. The other kinds of devices are of other structures (`benchmarks.simulated_devices`).
Everything follows from the seed.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.simulated_devices import ATTENTION, EXPERTS, JaggedDevice, LumpyDevice, SmoothDevice
from bexp.explorer.cost_model.components import Component
from bexp.explorer.cost_model.composition import Composition
from bexp.explorer.cost_model.required_memory import required_table
from bexp.explorer.cost_model.step import memory_limit
from bexp.explorer.formats.document import load_document
from bexp.explorer.formats.request import parse_request
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import ComponentFigures, Outcome, PhaseSeconds, WholeModelMeasurement
from bexp.explorer.spec.hardware import BackendSupport, HardwareSpec
from bexp.explorer.spec.model import ModelSpec
from bexp.explorer.spec.request import ExplorationRequest
from bexp.workers.replay.recording import Recording
from bexp.workers.replay.rows import ComponentRow, RecordingHeader, WholeModelRow, encode_row

RESULTS = Path(__file__).resolve().parent / "results"
RUNS = 8  # twice as many as a search makes of one component: drawn from few, repeats would agree on a wrong mean
WHOLE_MODEL_ERROR = 0.002
FRAGMENTATION_STD = 0.003
DEVICES = {"smooth": SmoothDevice, "jagged": JaggedDevice, "lumpy": LumpyDevice}


def simulate(
    name: str,
    request: ExplorationRequest,
    report: DeviceReport,
    seed: int,
    *,
    whole_model_share: float = 0.0,
    kind: str = "smooth",
) -> Recording:
    """A complete table of a device of `kind`; of its candidates `whole_model_share` are also timed whole."""
    device = DEVICES[kind](request, report.hardware, seed)
    rng = np.random.default_rng(seed)
    header = RecordingHeader(
        name=name,
        request=request,
        report=report,
        recorded_at=datetime(2026, 1, 1, tzinfo=UTC),
        process_start_seconds=6.0,
        noise=device.describe_noise(),
    )
    recording = Recording(header)
    for model in request.space.variants():
        table = recording.prune(request, model).table
        if table is None:
            continue
        for component in table.components:
            if component not in recording.components:
                for run in range(RUNS):
                    recording.add(_component_row(device, component, model, run, rng))
        if whole_model_share > 0:
            _add_whole_models(recording, device, table, rng, whole_model_share)
    return recording


def _component_row(
    device: SmoothDevice, component: Component, model: ModelSpec, run: int, rng: np.random.Generator
) -> ComponentRow:
    true, host = device.seconds(component, model)
    seconds = true * device.run_factor(component, run, rng)
    saved, forward, backward = device.sizes(component, model)
    figures = ComponentFigures(
        device_seconds=seconds,
        host_seconds=host,
        forward_device_seconds=seconds / 3,
        standard_error_seconds=device.standard_error(component) * seconds,
        repeats=8,
        saved_bytes=saved,
        forward_peak_bytes=forward,
        backward_peak_bytes=backward,
    )
    phases = PhaseSeconds(build=0.02, warm_up=0.02 + 2.5 * true, timed=0.25 + 9 * true, messaging=0.03)
    return ComponentRow(component=component, run=run, figures=figures, phases=phases)


def _add_whole_models(
    recording: Recording, device: SmoothDevice, table: Composition, rng: np.random.Generator, share: float
) -> None:
    request, hardware = recording.header.request, recording.header.report.hardware
    pairs = [device.seconds(c, table.model) for c in table.components]
    device_NK, host_K = np.array([[d for d, _ in pairs]]), np.array([h for _, h in pairs])
    micro_steps = table.micro_step_seconds(device_NK, host_K)[0]
    optimizer = table.optimizer_seconds(device_NK, host_K)[0]
    sizes = np.array([device.sizes(c, table.model) for c in table.components], dtype=np.float64).T
    activations = np.add(*table.activation_bytes(*sizes))
    limit = memory_limit(request, hardware)
    required = required_table(table, activations, hardware)
    chosen = rng.random(len(table.candidates)) < share
    unplaced = required * (1 + FRAGMENTATION_STD * np.abs(rng.standard_normal(len(required)))) > limit
    for row in np.flatnonzero((required <= limit) & chosen):
        candidate = table.candidates[row]
        micro_step = float(micro_steps[row]) * device.whole_model_factor(candidate)
        peak = round(float(table.static_bytes_C[row] + activations[row]))
        phases = PhaseSeconds(build=0.5, warm_up=2 * micro_step + 0.5, timed=6 * micro_step + 0.5, messaging=0.05)
        if unplaced[row]:  # the allocator could not place what composes to less than the limit
            recording.add(
                WholeModelRow(
                    candidate=candidate, run=0, outcome=Outcome.OUT_OF_MEMORY, reason="simulated", phases=phases
                )
            )
            continue
        figures = WholeModelMeasurement(
            micro_step_seconds=micro_step * float(np.exp(WHOLE_MODEL_ERROR * rng.standard_normal())),
            optimizer_seconds=float(optimizer[row]),
            standard_error_seconds=WHOLE_MODEL_ERROR * micro_step,
            peak_bytes=peak,
            reserved_bytes=round(1.01 * peak),
            repeats=5,
        )
        recording.add(WholeModelRow(candidate=candidate, run=0, figures=figures, phases=phases))


def h200_report(model: ModelSpec) -> DeviceReport:
    """The H200 of the recorded explorations, with all back ends."""
    hardware: dict[str, Any] = json.loads((RESULTS / "h200-explorations.json").read_text())["hardware"]
    return DeviceReport(
        hardware=HardwareSpec.model_validate(hardware | {"device_name": "simulated H200"}),
        attention_backends=tuple(BackendSupport(name=name, usable=True) for name in ATTENTION),
        expert_backends=tuple(BackendSupport(name=name, usable=True) for name in EXPERTS) if model.moe else (),
        default_attention="cudnn",
        default_experts="grouped_mm" if model.moe else None,
    )


def write(recording: Recording, path: Path) -> None:
    """Write a table as the recorder would have."""
    lines = [encode_row(recording.header)]
    lines += [encode_row(row) for rows in recording.components.values() for row in rows]
    lines += [encode_row(row) for rows in recording.whole_models.values() for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))


def main(arguments: list[str] | None = None) -> int:
    """One table a configuration."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("configs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="a directory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=DEVICES, default="smooth")
    parser.add_argument("--whole-model-share", type=float, default=0.0)
    options = parser.parse_args(arguments)
    for path in options.configs:
        request = parse_request(load_document(path.read_text()))
        report = h200_report(request.shapes)
        recording = simulate(
            path.stem, request, report, options.seed, whole_model_share=options.whole_model_share, kind=options.device
        )
        target = options.out / f"{options.device}-{path.stem}-{options.seed}.jsonl"
        write(recording, target)
        print(f"{target}: {len(recording.components)} components, {len(recording.whole_models)} whole models")
    return 0


if __name__ == "__main__":
    sys.exit(main())
