"""Recorded tables of devices that exist only in arithmetic, for working on the search where there is no GPU.

    python -m benchmarks.simulated_tables examples/olmoe-1b-7b.yaml ... --out DIRECTORY [--seed N]

Each kernel has an efficiency over the roofline that saturates with the tokens it sees, droops for large ones and
jumps by wave quantisation; back ends cross over; bytes are off the prediction by kin; whole models differ from what
their components add up to, partly together, partly each by itself. The ranges are those that H200 runs under
results/ show. Everything follows from the seed.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from explorer.candidates import Candidate
from explorer.components import BlockRecompute, Component, ComponentKind
from explorer.composition import memory_limit
from explorer.footprint import predict_component_bytes
from explorer.formats.document import load_document
from explorer.formats.request import parse_request
from explorer.hardware import BackendSupport, DeviceReport, HardwareSpec
from explorer.measurements import Outcome, PhaseSeconds, WholeModelMeasurement
from explorer.memory import required_table
from explorer.models import ModelSpec
from explorer.requests import ExplorationRequest
from explorer.roofline import predict_component_seconds
from explorer.table import SpaceTable
from workers.replay.recording import Recording
from workers.replay.rows import ComponentFigures, ComponentRow, RecordingHeader, WholeModelRow, encode_row

RESULTS = Path(__file__).resolve().parent / "results"
ATTENTION = {"cudnn": 0.62, "flash": 0.5, "efficient": 0.28, "math": 0.4}
EXPERTS = {
    "grouped_mm": 0.5,
    "loop": 0.25,
    "bmm": 0.45,
    "fused": 0.6,
    "triton_grouped": 0.5,
    "cublas_grouped": 0.3,
    "block_sparse": 0.35,
}
RUNS = 3
RUN_STD = 0.004
COMPOSITION_SHARED_STD = 0.015
COMPOSITION_OWN_STD = 0.004


class SimulatedDevice:
    """Hidden truths of one device for one request, all drawn from a seed."""

    def __init__(self, request: ExplorationRequest, hardware: HardwareSpec, seed: int) -> None:
        self._request = request
        self._hardware = hardware
        self._seed = seed
        self.composition_bias = 1 + COMPOSITION_SHARED_STD * self._normal("composition")

    def seconds(self, component: Component, model: ModelSpec) -> tuple[float, float]:
        """Device and host seconds without noise."""
        predicted = predict_component_seconds(component, model, self._request, self._hardware)
        if component.kind is ComponentKind.OPTIMIZER:
            return predicted.device / 0.8, predicted.host
        sort = f"{component.kind}:{component.backend}"
        typical = {**ATTENTION, **EXPERTS}.get(component.backend or "", 0.65)
        peak = typical * np.exp(0.15 * self._normal(f"peak:{sort}"))
        tokens = (component.bta_tile or component.micro_batch_size) * model.seq_length
        half = 600 * np.exp(0.7 * self._normal(f"half:{sort}"))
        droop = 0.02 * abs(self._normal(f"droop:{sort}")) * max(0.0, np.log2(tokens / 16384))
        wave = 0.02 * self._normal(f"wave:{sort}:{component.micro_batch_size}:{component.bta_tile}")
        mode = 0.02 * self._normal(f"mode:{sort}:{component.recompute}:{component.bta_tile is None}")
        own = 0.004 * self._normal(f"own:{component.key}")
        recomputes = component.recompute is not BlockRecompute.NONE
        efficiency = peak * tokens / (tokens + half) * (1 - min(0.3, droop))
        device = predicted.device / efficiency * np.exp(wave + own + (mode if recomputes else 0.0))
        return float(device), predicted.host * 1.4 * float(np.exp(0.2 * self._normal(f"host:{sort}")))

    def sizes(self, component: Component, model: ModelSpec) -> tuple[int, int, int]:
        """Saved, forward-peak and backward-peak bytes."""
        predicted = predict_component_bytes(component, model, self._request)
        kin = f"{component.kind}:{component.backend}:{component.recompute}:{component.bta_tile is None}"
        factor = 1.05 * np.exp(0.08 * self._normal(f"bytes:{kin}"))
        saved, forward, backward = (
            round(factor * b) for b in (predicted.saved, predicted.forward_peak, predicted.backward_peak)
        )
        return saved, forward, backward

    def whole_model_factor(self, candidate: Candidate) -> float:
        """Whole over composed seconds."""
        return self.composition_bias * float(np.exp(COMPOSITION_OWN_STD * self._normal(candidate.describe())))

    def _normal(self, name: str) -> float:
        return float(np.random.default_rng([self._seed, zlib.crc32(name.encode())]).standard_normal())


def simulate(
    name: str, request: ExplorationRequest, report: DeviceReport, seed: int, *, whole_model_share: float = 0.0
) -> Recording:
    """A complete table; of its candidates `whole_model_share` are also timed whole."""
    device = SimulatedDevice(request, report.hardware, seed)
    rng = np.random.default_rng(seed)
    header = RecordingHeader(
        name=name,
        request=request,
        report=report,
        recorded_at=datetime(2026, 1, 1, tzinfo=UTC),
        process_start_seconds=6.0,
        noise=f"simulated: runs differ by {RUN_STD:.1%}, medians by half of that",
    )
    recording = Recording(header)
    for model in request.variants():
        table = recording.survey(request, model).table
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
    device: SimulatedDevice, component: Component, model: ModelSpec, run: int, rng: np.random.Generator
) -> ComponentRow:
    true, host = device.seconds(component, model)
    seconds = true * float(np.exp(RUN_STD * rng.standard_normal()))
    saved, forward, backward = device.sizes(component, model)
    figures = ComponentFigures(
        device_seconds=seconds,
        host_seconds=host,
        forward_device_seconds=seconds / 3,
        standard_error_seconds=RUN_STD / 2 * seconds,
        repeats=8,
        saved_bytes=saved,
        forward_peak_bytes=forward,
        backward_peak_bytes=backward,
    )
    phases = PhaseSeconds(build=0.02, warm_up=0.02 + 2.5 * true, timed=0.25 + 9 * true, messaging=0.03)
    return ComponentRow(component=component, run=run, figures=figures, phases=phases)


def _add_whole_models(
    recording: Recording, device: SimulatedDevice, table: SpaceTable, rng: np.random.Generator, share: float
) -> None:
    request, hardware = recording.header.request, recording.header.report.hardware
    pairs = [device.seconds(c, table.model) for c in table.components]
    device_NK, host_K = np.array([[d for d, _ in pairs]]), np.array([h for _, h in pairs])
    micro_steps = table.micro_step_seconds(device_NK, host_K)[0]
    optimizer = table.optimizer_seconds(device_NK, host_K)[0]
    sizes = np.array([device.sizes(c, table.model) for c in table.components], dtype=np.float64).T
    activations = np.add(*table.activation_bytes(*sizes))
    limit = memory_limit(request, hardware)
    fits = required_table(table, activations, hardware) <= limit
    for row in np.flatnonzero(fits & (rng.random(len(table.candidates)) < share)):
        candidate = table.candidates[row]
        micro_step = float(micro_steps[row]) * device.whole_model_factor(candidate)
        peak = round(float(table.static.total + activations[row]))
        phases = PhaseSeconds(build=0.5, warm_up=2 * micro_step + 0.5, timed=6 * micro_step + 0.5, messaging=0.05)
        if rng.random() < 0.02:  # what the allocator could not place
            recording.add(
                WholeModelRow(
                    candidate=candidate, run=0, outcome=Outcome.OUT_OF_MEMORY, reason="simulated", phases=phases
                )
            )
            continue
        figures = WholeModelMeasurement(
            micro_step_seconds=micro_step * float(np.exp(RUN_STD / 2 * rng.standard_normal())),
            optimizer_seconds=float(optimizer[row]),
            standard_error_seconds=RUN_STD / 2 * micro_step,
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
    parser.add_argument("--whole-model-share", type=float, default=0.0)
    options = parser.parse_args(arguments)
    for path in options.configs:
        request = parse_request(load_document(path.read_text()))
        report = h200_report(request.model)
        found = simulate(path.stem, request, report, options.seed, whole_model_share=options.whole_model_share)
        target = options.out / f"simulated-{path.stem}-{options.seed}.jsonl"
        write(found, target)
        print(f"{target}: {len(found.components)} components, {len(found.whole_models)} whole models")
    return 0


if __name__ == "__main__":
    sys.exit(main())
