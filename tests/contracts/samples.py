"""Values for contract tests."""

from __future__ import annotations

from typing import Any

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.cost.step import MemoryParts
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.hardware import BackendSupport, HardwareSpec, SoftwareVersions
from bexp.explorer.model.model import DType, ModelSpec
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.event import EventCode, EventDraft, Progress
from bexp.explorer.records.measurement import ComponentMeasurement, Measurement, Outcome
from bexp.explorer.records.recommendation import Recommendation
from bexp.explorer.records.trial import Trial, TrialKind
from bexp.explorer.request.request import ExplorationRequest
from bexp.storage.workers import WorkerInfo

MODEL = ModelSpec(
    name="tiny", num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4, vocab_size=64, seq_length=16
)


def make_request(**changes: Any) -> ExplorationRequest:
    return ExplorationRequest(**({"model": MODEL} | changes))


def make_report(device_name: str = "A device", device_kind: str = "cpu") -> DeviceReport:
    hardware = HardwareSpec(
        device_kind="cuda" if device_kind == "cuda" else "cpu",
        device_name=device_name,
        memory_bytes=1 << 30,
        memory_limit_bytes=1 << 29,
        matmul_flops_per_second={DType.FLOAT32: 1e11},
        memory_bandwidth_bytes_per_second=1e10,
        launch_seconds=1e-5,
        versions=SoftwareVersions(python="3.12", torch="2.13"),
    )
    return DeviceReport(
        hardware=hardware, attention_backends=(BackendSupport(name="math", usable=True),), default_attention="math"
    )


def make_worker(
    worker_id: str = "a", device_kind: str = "cpu", num_devices: int = 1, fingerprint: str = "f", **changes: Any
) -> WorkerInfo:
    told = {"host": "host", "pid": 1, "device_name": "A device", "targets": {"bexp": ""}}
    told |= {"memory_limit_bytes": 1, "memory_bytes": 2 << 30}
    known = {"device_kind": device_kind, "num_devices": num_devices, "fingerprint": fingerprint}
    return WorkerInfo(**{"id": worker_id, **told, **known, **changes})


def make_candidate(micro_batch_size: int = 1) -> Candidate:
    return Candidate(micro_batch_size=micro_batch_size, attention_backend="math", num_query_groups=4)


def make_trial(number: int, outcome: Outcome = Outcome.OK) -> Trial:
    component = Component(kind=ComponentKind.ATTENTION, micro_batch_size=number + 1, backend="math", num_query_groups=4)
    measured = ComponentMeasurement(
        component=component,
        device_seconds=0.1 + 0.2 * number,
        host_seconds=0.01,
        forward_device_seconds=0.03,
        standard_error_seconds=1e-5,
        repeats=5,
        saved_bytes=1,
        forward_peak_bytes=2,
        backward_peak_bytes=3,
    )
    measurement = Measurement(candidate=make_candidate(number + 1), outcome=outcome, components=(measured,))
    return Trial(number=number, kind=TrialKind.COMPONENTS, measurement=measurement, tokens_per_second=1e3 / 3)


def make_recommendation(micro_batch_size: int = 2) -> Recommendation:
    return Recommendation(
        candidate=make_candidate(micro_batch_size),
        base=make_candidate(),
        tokens_per_second=1000.0,
        performance=1.2,
        confidence=45,
        step_seconds=1.0,
        micro_step_seconds=0.1,
        optimizer_seconds=0.05,
        composed_tokens_per_second=1000.0,
        grad_accum_steps=256,
        predicted_peak_bytes=1 << 20,
        measured_peak_bytes=1 << 20,
        required_bytes=1 << 21,
        memory_limit_bytes=1 << 29,
        memory=MemoryParts(parameters=1),
    )


def make_progress(number: int) -> Progress:
    """A trial with its event and the recommendation that it leads to."""
    return Progress(
        events=(EventDraft(code=EventCode.TRIAL, message=f"trial {number}", data={"number": number}),),
        trial=make_trial(number),
        recommendation=make_recommendation(number + 1),
    )
