"""Recorded tables of a simulated device: everything follows from the seed.

The kernels have an efficiency over the roofline that saturates with the tokens they see, droops for large ones and
jumps by wave quantisation; back ends cross over; bytes are off the prediction by similar; whole models differ from what
their components add up to, partly together, partly each by itself.
"""

from __future__ import annotations

import json
import zlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import ROOT
from benchmarks.recording_file import encode_row
from bexp.explorer.cost.activation_memory import predict_component_bytes
from bexp.explorer.cost.components import BlockRecompute, Component, ComponentKind
from bexp.explorer.cost.composition import Composition, required_table
from bexp.explorer.cost.roofline import roofline_seconds
from bexp.explorer.cost.step import memory_limit
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.hardware import BackendSupport, HardwareSpec
from bexp.explorer.model.model import ModelSpec
from bexp.explorer.model.parts import ExploredModel
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import ComponentFigures, Outcome, PhaseSeconds, WholeModelMeasurement
from bexp.explorer.request.request import ExplorationRequest
from bexp.workers.replay.recording import ComponentRow, Recording, RecordingHeader, WholeModelRow

ATTENTION = {"cudnn": 0.62, "flash": 0.5, "efficient": 0.28, "math": 0.4}
EXPERTS = {"grouped_mm": 0.5, "loop": 0.25, "bmm": 0.45, "fused": 0.6, "hopper_grouped": 0.52}
RUNS = 8  # twice as many as a search makes of one component: drawn from few, repeats would agree on a wrong mean
WHOLE_MODEL_ERROR = 0.002
FRAGMENTATION_STD = 0.003
RUN_STD = 0.004
COMPOSITION_SHARED_STD = 0.015
COMPOSITION_OWN_STD = 0.004


class SmoothDevice:
    """Kernels whose efficiency over the roofline saturates with the tokens they see and droops for large ones.

    Waves and each component's own part come on top; back ends cross over; runs differ by a normal error.
    """

    def __init__(self, request: ExplorationRequest, hardware: HardwareSpec, seed: int) -> None:
        self._request = request
        self._hardware = hardware
        self._seed = seed
        self._composition_bias = 1 + COMPOSITION_SHARED_STD * self._normal("composition")

    def seconds(self, component: Component, model: ExploredModel) -> tuple[float, float]:
        """Device and host seconds without noise."""
        predicted = roofline_seconds(component, model, self._request, self._hardware)
        if component.kind is ComponentKind.OPTIMIZER:
            return predicted.device / 0.8, predicted.host
        sort = f"{component.kind}:{component.backend}"
        typical = {**ATTENTION, **EXPERTS}.get(str(component.backend), 0.65)
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

    def sizes(self, component: Component, model: ExploredModel) -> tuple[int, int, int]:
        """Saved, forward-peak and backward-peak bytes."""
        predicted = predict_component_bytes(component, model, self._request)
        similar = f"{component.kind}:{component.backend}:{component.recompute}:{component.bta_tile is None}"
        factor = 1.05 * np.exp(0.08 * self._normal(f"bytes:{similar}"))
        saved, forward, backward = (
            round(factor * b) for b in (predicted.saved, predicted.forward_peak, predicted.backward_peak)
        )
        return saved, forward, backward

    def whole_model_factor(self, candidate: Candidate) -> float:
        """Whole over composed seconds."""
        return self._composition_bias * float(np.exp(COMPOSITION_OWN_STD * self._normal(candidate.describe())))

    def standard_error(self, component: Component) -> float:
        """Relative standard error that one run states of its median."""
        return RUN_STD / 2

    def run_factor(self, component: Component, run: int, rng: np.random.Generator) -> float:
        """What the seconds of one run are off by."""
        return float(np.exp(RUN_STD * rng.standard_normal()))

    def _normal(self, name: str) -> float:
        return float(np.random.default_rng([self._seed, zlib.crc32(name.encode())]).standard_normal())


def simulate(
    name: str, request: ExplorationRequest, report: DeviceReport, seed: int, *, whole_model_share: float = 0.0
) -> Recording:
    """A complete table of a device; of its candidates `whole_model_share` are also timed whole."""
    device = SmoothDevice(request, report.hardware, seed)
    rng = np.random.default_rng(seed)
    header = RecordingHeader(
        name=name,
        request=request,
        report=report,
        recorded_at=datetime(2026, 1, 1, tzinfo=UTC),
        process_start_seconds=6.0,
        noise="simulated",
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
    hardware: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "h200-explorations.json").read_text())[
        "hardware"
    ]
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
