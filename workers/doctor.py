"""`bexp doctor`: which devices and back ends can be used here, and why the others cannot."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pydantic import Field

from bexp.explorer.dimensions.execution import EXECUTION, Execution
from bexp.explorer.model.base import Frozen
from bexp.explorer.model.hardware import NAME_IT, BackendSupport
from bexp.explorer.model.model import ModelSpec, MoESpec
from bexp.explorer.model.target import TRANSFORMERS, describe_target
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.request.request import ExplorationRequest
from bexp.storage.ids import worker_prefix
from bexp.targets.registry import installed_targets
from bexp.workers.devices.discovery import visible_devices, why_no_gpu
from bexp.workers.devices.holder import Holder
from bexp.workers.devices.lock import DeviceBusyError
from bexp.workers.instruments.compilation import missing_compiler
from bexp.workers.process.interface import ProfilerError
from bexp.workers.process.profiler import Profiler

if TYPE_CHECKING:
    from rich.console import Console

LOCK_TIMEOUT_SECONDS = 2.0

DENSE = ModelSpec(
    name="dense-reference",
    num_layers=2,
    hidden_size=512,
    ffn_hidden_size=1024,
    num_attention_heads=8,
    num_query_groups=2,
    vocab_size=4096,
    seq_length=256,
)
MOE = DENSE.model_copy(
    update={"name": "moe-reference", "moe": MoESpec(num_experts=8, top_k=2, expert_ffn_hidden_size=256)}
)


class DeviceDiagnosis(Frozen):
    """One device, and what it can be used for."""

    device: str
    usable: bool
    busy: bool = False
    """It belongs to a worker or an exploration: jobs that are submitted run there."""
    reason: str | None = None
    """Why the device cannot be used now; None if it can."""
    report: DeviceReport | None = None
    """None if the device cannot be used now."""
    compile_reason: str | None = None
    """Why torch.compile cannot be used; None if it can."""


class Diagnosis(Frozen):
    """Every device of this host, and the version of each target that is installed, by name."""

    devices: tuple[DeviceDiagnosis, ...]
    targets: dict[str, str] = Field(default_factory=dict)


def main(json_output: bool) -> int:
    """Try each visible device; returns 0 if one is usable or busy, else 1."""
    diagnosis = diagnose(os.environ)
    if json_output:
        sys.stdout.write(diagnosis.model_dump_json(indent=2) + "\n")
    else:
        from rich.console import Console  # noqa: PLC0415 - workers, which import this module, print nothing

        _print(diagnosis, Console())
    return 0 if any(device.usable or device.busy for device in diagnosis.devices) else 1


def diagnose(environment: Mapping[str, str]) -> Diagnosis:
    """Start a profiler on each visible device, and ask for its back ends for a small dense and a small MoE model."""
    devices = [_diagnose_device(device, environment) for device in visible_devices(environment)]
    reason = why_no_gpu(environment)
    if reason is not None:
        devices.append(DeviceDiagnosis(device="cuda", usable=False, reason=reason))
    return Diagnosis(devices=tuple(devices), targets=installed_targets())


def _diagnose_device(device: str, environment: Mapping[str, str]) -> DeviceDiagnosis:
    try:
        with Profiler(
            device, environment=environment, lock_timeout_seconds=LOCK_TIMEOUT_SECONDS, start_pauses_seconds=()
        ) as profiler:
            report = profiler.begin(ExplorationRequest(model=MOE, executions=(Execution.EAGER, Execution.GRAPH)))
    except DeviceBusyError as error:
        return DeviceDiagnosis(device=device, usable=False, busy=True, reason=_held_by(error.holder))
    except ProfilerError as error:
        return DeviceDiagnosis(device=device, usable=False, reason=str(error))
    return DeviceDiagnosis(
        device=device,
        usable=True,
        report=report,
        compile_reason=missing_compiler(report.hardware.device_kind),
    )


def _held_by(holder: Holder | None) -> str:
    """Return who holds a device; a worker by the beginning of its id in `bexp workers`."""
    if holder is None:
        return "held by another process"
    is_worker = "-m bexp.workers" in holder.text
    name = f"worker {worker_prefix(socket.gethostname(), holder.pid)[:-1]}, " if is_worker else ""
    return f"held by {name}{holder.text}"


def _print(diagnosis: Diagnosis, console: Console) -> None:
    from rich.markup import escape  # noqa: PLC0415 - as above

    for device in diagnosis.devices:
        title = f"[bold]{device.device}[/bold]"
        if device.report is None:
            state = "busy" if device.busy else "not usable"
            console.print(f"{title}  {state}: {escape(device.reason or '')}", highlight=False)
            continue
        hardware = device.report.hardware
        console.print(f"{title}  {hardware.describe()}", highlight=False)
        from rich.table import Table  # noqa: PLC0415 - as above

        table = Table(show_header=False, box=None, padding=(0, 2))
        for name, value in _facts(device, device.report):
            table.add_row(name, escape(value))
        console.print(table)
    console.print(f"[bold]targets[/bold]  {_describe_targets(diagnosis.targets)}", highlight=False)


def _describe_targets(targets: Mapping[str, str]) -> str:
    descriptions = [describe_target(name, version) for name, version in targets.items()]
    if TRANSFORMERS not in targets:
        descriptions.append(f"{TRANSFORMERS} is not installed: pip install 'bexp\\[transformers]'")
    return "; ".join(descriptions)


def _facts(device: DeviceDiagnosis, report: DeviceReport) -> Iterator[tuple[str, str]]:
    hardware = report.hardware
    versions = {name: value for name, value in hardware.versions if value is not None}
    yield "versions", ", ".join(f"{name} {value}" for name, value in versions.items())
    peaks = hardware.matmul_flops_per_second.items()
    yield "matmul", ", ".join(f"{dtype} {peak / 1e12:.3g} TFLOP/s" for dtype, peak in peaks)
    yield "memory bandwidth", f"{hardware.memory_bandwidth_bytes_per_second / 1e9:.4g} GB/s (read + write)"
    yield "launch", f"{hardware.launch_seconds * 1e6:.2g} us per operation"
    yield "memory limit", f"{hardware.memory_limit_bytes / 2**30:.1f} of {hardware.memory_bytes / 2**30:.1f} GiB"
    for label, backends in (("attention", report.attention_backends), ("experts", report.expert_backends)):
        default = report.default_attention if label == "attention" else report.default_experts
        for backend in backends:
            yield f"{label} {backend.name}", _describe(backend, default=backend.name == default)
    yield "torch.compile", device.compile_reason or "usable"
    for execution in report.choices.get(EXECUTION.name, ()):
        if execution.name == Execution.GRAPH:
            yield "CUDA graphs", _describe(execution, default=False)


def _describe(backend: BackendSupport, *, default: bool) -> str:
    if backend.reason == NAME_IT:
        return "explored only if a request names it"
    if not backend.usable:
        return f"not usable: {backend.reason}"
    return "usable, the default" if default else "usable"
