"""A device that exists only in arithmetic: hidden efficiencies over the roofline, noise, and a memory of its own."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from bexp.explorer.cost.activation_memory import predict_component_bytes
from bexp.explorer.cost.collectives import FORWARD_SHARES, Overlap
from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.cost.composition import Composition
from bexp.explorer.cost.roofline import roofline_seconds
from bexp.explorer.cost.step import combine_seconds
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.meshes.knowledge import MeshKnowledge
from bexp.explorer.meshes.layers import MeshCandidate
from bexp.explorer.meshes.mesh import MeshRun
from bexp.explorer.meshes.shards import SPREAD_EXPERTS, expert_chunk, predict_shard_bytes, shard_of
from bexp.explorer.model.hardware import BackendSupport, HardwareSpec, SoftwareVersions
from bexp.explorer.model.model import DType, ModelSpec
from bexp.explorer.model.parts import ExploredModel
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import (
    ComponentMeasurement,
    Conditions,
    Measurement,
    Outcome,
    PhaseSeconds,
    WholeModelMeasurement,
)
from bexp.explorer.records.trial import TrialKind, TrialTask
from bexp.explorer.request.request import ExplorationRequest

GIB = 2**30
ATTENTION_SPEED = {"cudnn": 0.8, "flash": 0.55, "efficient": 0.3, "math": 0.5}
LINK_BYTES_PER_SECOND, LINK_SECONDS = 1e11, 1e-5
"""Of what devices of a mesh exchange."""
EXPERT_SPEED = {"grouped_mm": 0.7, "loop": 0.35, "bmm": 0.5}


def report(*, memory_gib: float = 132.0, experts: bool = True, num_devices: int = 1) -> DeviceReport:
    """An H200-like device, or several; all attention but `efficient` serves sequences that they share."""
    return DeviceReport(
        hardware=HardwareSpec(
            device_kind="cuda",
            device_name="simulated",
            num_devices=num_devices,
            memory_bytes=round(memory_gib * GIB),
            memory_limit_bytes=round(memory_gib * GIB),
            context_bytes=GIB // 2,
            matmul_flops_per_second={DType.BFLOAT16: 774e12, DType.FLOAT32: 50e12},
            memory_bandwidth_bytes_per_second=4.3e12,
            launch_seconds=5e-6,
            versions=SoftwareVersions(python="3.12", torch="2.11"),
        ),
        attention_backends=tuple(
            BackendSupport(name=name, usable=True, context_parallel=name != "efficient") for name in ATTENTION_SPEED
        ),
        expert_backends=tuple(BackendSupport(name=name, usable=True) for name in EXPERT_SPEED) if experts else (),
        default_attention="cudnn",
        default_experts="grouped_mm" if experts else None,
    )


class SimulatedDevice:
    """Measures plans. `activations` scales real over predicted activation bytes.

    `conditions` tells those of a component in a trial, or of a trial's whole model (null).
    """

    def __init__(
        self, request: ExplorationRequest, seed: int = 0, noise: float = 0.002, activations: float = 1.1
    ) -> None:
        self.request = request
        self.hardware = report().hardware
        self.noise = noise
        self.activations = activations
        self.rng = np.random.default_rng(seed)
        self.plans: list[TrialTask] = []
        self.whole_model_outcomes: list[Outcome] = []
        self.whole_model_factor = 1.0
        self.whole_model_error = 0.001
        self.layout_speed: dict[str, float] = {}  # of attention whose sequences several devices share
        self.traffic_factor = 1.3  # of gradients and parameters, over what the links lead to expect
        self.slowdown = 0.3
        self.host_overhead = (0.0, 0.0)  # host seconds about it, in each micro-step and once a step more
        self.own_factors: dict[Candidate, float] = {}  # of whole models of single candidates, on top
        self.conditions: Callable[[TrialTask, Component | None], Conditions | None] = lambda plan, component: None

    def seconds(self, component: Component, model: ExploredModel) -> tuple[float, float]:
        """True device and host seconds."""
        if component.exchange is not None:
            return component.exchange.num_bytes / LINK_BYTES_PER_SECOND + LINK_SECONDS, LINK_SECONDS
        of, request = self._shard(component, model)
        predicted = roofline_seconds(component, of, request, self.hardware)
        if component.part == SPREAD_EXPERTS:
            number = component.overlap_degree
            predicted = replace(predicted, device=number * predicted.device, host=number * predicted.host)
        speed = self.layout_speed.get(component.context_parallel_layout or "", 1.0)
        speed *= {**ATTENTION_SPEED, **EXPERT_SPEED}.get(str(component.backend), 0.65)
        batch = (component.bta_tile or component.micro_batch_size) / component.context_parallel_size
        own = 1 + 0.01 * (zlib.crc32(component.key.encode()) % 100 / 50 - 1)
        if component.kind is ComponentKind.OPTIMIZER:
            return predicted.device / 0.8, predicted.host
        if component.kind is ComponentKind.COMMUNICATION:
            return self.traffic_factor * predicted.device, predicted.host
        ramp = batch / (batch + 0.7) * (1 - 0.03 * np.log2(max(1.0, component.sequences / 8)))
        return predicted.device / (speed * ramp) * own, predicted.host * 1.3

    def weigh(self, component: Component, model: ExploredModel) -> tuple[int, int, int]:
        """True bytes."""
        if component.exchange is not None:
            return 0, 0, 0
        if isinstance(model, ModelSpec):
            sizes = predict_shard_bytes(component, model, self.request)
        else:
            sizes = predict_component_bytes(component, model, self.request)
        saved, forward, backward = (
            round(self.activations * b) for b in (sizes.saved, sizes.forward_peak, sizes.backward_peak)
        )
        return saved, forward, backward

    def _shard(self, component: Component, model: ExploredModel) -> tuple[ExploredModel, ExplorationRequest]:
        """The block of one device of a mesh, as the profiler builds it."""
        if not isinstance(model, ModelSpec):
            return model, self.request
        shard = expert_chunk if component.part == SPREAD_EXPERTS else shard_of
        return shard(component, model, self.request)

    def __call__(self, task: TrialTask) -> Measurement:
        """Measure a plan as the profiler would."""
        self.plans.append(task)
        if task.kind is TrialKind.WHOLE_MODEL:
            return self._whole_model(task)
        found = []
        for component in task.components:
            device, host = self.seconds(component, task.model)
            device *= 1 + self.noise * float(self.rng.standard_normal())
            saved, forward, backward = self.weigh(component, task.model)
            exchange = component.kind is ComponentKind.COMMUNICATION
            gathered = self.forward_share(component) if exchange else 1 / 3
            found.append(
                ComponentMeasurement(
                    component=component,
                    device_seconds=device,
                    host_seconds=self.host_overhead[0] if exchange else host,
                    forward_device_seconds=gathered * device,
                    standard_error_seconds=device * self.noise,
                    repeats=10,
                    saved_bytes=saved,
                    forward_peak_bytes=forward,
                    backward_peak_bytes=backward,
                    slowdown=self.slowdown if exchange else None,
                    host_once_seconds=self.host_overhead[1] if exchange else None,
                    conditions=self.conditions(task, component),
                )
            )
        phases = PhaseSeconds(timed=sum(12 * c.device_seconds for c in found), build=0.1 * len(found))
        return Measurement(candidate=task.candidate, outcome=Outcome.OK, components=tuple(found), phases=phases)

    def true_tokens_per_second(self, table: Composition) -> np.ndarray:
        """Noise-free throughput of every candidate, shape (C,)."""
        pairs = [self.seconds(c, table.model) for c in table.components]
        device = np.array([[d for d, _ in pairs]])
        host = np.array([h for _, h in pairs])
        return np.asarray(table.tokens_per_second(device, host, overlap=self.overlap(table))[0])

    def overlap(self, table: Composition) -> Overlap:
        """How the exchange passes beside computation."""
        shares = np.full(len(table.components), 1 / 3)
        for communication in table.communications:
            shares[table.column[communication]] = self.forward_share(communication)
        host_overhead = np.zeros((2, len(table.components)))
        for communication in table.communications:
            host_overhead[:, table.column[communication]] = self.host_overhead
        return Overlap(shares, np.full(len(table.components), self.slowdown), host_overhead)

    def forward_share(self, communication: Component) -> float:
        """Of what is exchanged, what is gathered in forward."""
        return FORWARD_SHARES[self.request.sharded(communication.sharding).training.sharding]

    def _whole_model(self, task: TrialTask) -> Measurement:
        outcome = self.whole_model_outcomes.pop(0) if self.whole_model_outcomes else Outcome.OK
        if outcome is not Outcome.OK:
            return Measurement(candidate=task.candidate, outcome=outcome, reason="simulated")
        factor = self.whole_model_factor * self.own_factors.get(task.candidate, 1.0)
        if isinstance(task.shared_run, MeshRun):
            return self._mesh_model(task, task.shared_run, factor)
        communicates = task.num_processes > 1 and self.request.mode == "train"
        table = Composition([task.candidate], task.model, self.request, communicates=communicates)
        pairs = [self.seconds(c, task.model) for c in table.components]
        device, host = np.array([[d for d, _ in pairs]]), np.array([h for _, h in pairs])
        micro_step = table.micro_step_seconds(device, host)
        communication = float(table.communication_seconds(device, host, micro_step, self.overlap(table))[0, 0])
        step = combine_seconds(
            float(micro_step[0, 0]),
            float(table.optimizer_seconds(device, host)[0, 0]),
            task.candidate.micro_batch_size,
            task.model,
            self.request,
            context_parallel_size=task.candidate.context_parallel_size,
        )
        sizes = np.array([self.weigh(c, task.model) for c in table.components], dtype=np.float64).T
        peak = round(float((table.static_bytes_C + np.add(*table.activation_bytes(*sizes)))[0]))
        whole = WholeModelMeasurement(
            micro_step_seconds=factor * step.micro_step,
            optimizer_seconds=factor * step.optimizer,
            communication_seconds=factor * communication if communicates else None,
            standard_error_seconds=self.whole_model_error * step.micro_step,
            peak_bytes=peak,
            reserved_bytes=peak,
            repeats=3,
            conditions=self.conditions(task, None),
        )
        return Measurement(candidate=task.candidate, outcome=Outcome.OK, whole_model=whole)

    def _mesh_model(self, task: TrialTask, run: MeshRun, factor: float) -> Measurement:
        space = MeshKnowledge(self.request, report())
        found = MeshCandidate(run.mesh, task.candidate)
        components = (*space.transfers, *space.composer.components(found))
        space.learn(self(task.model_copy(update={"kind": TrialKind.COMPONENTS, "components": components})).components)
        self.plans.pop()
        step = space.step(found, simulate=True, run=run)
        whole = WholeModelMeasurement(
            micro_step_seconds=factor * (step.seconds - step.optimizer_seconds) / run.num_micro_batches,
            optimizer_seconds=factor * step.optimizer_seconds,
            standard_error_seconds=self.whole_model_error * step.micro_step_seconds,
            peak_bytes=step.memory.total,
            reserved_bytes=step.memory.total,
            repeats=3,
            num_micro_batches=run.num_micro_batches,
        )
        return Measurement(candidate=task.candidate, outcome=Outcome.OK, whole_model=whole)
