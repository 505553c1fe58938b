"""Notes beside a recommendation: what was left out, and what a person has to know to run it."""

from __future__ import annotations

from collections.abc import Iterator

from bexp.explorer.cost.step import GIB
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.hardware import BackendSupport
from bexp.explorer.model.optimizers import ON_HOST_NOTE, PAGED_NOTE
from bexp.explorer.model.parts import ModelParts
from bexp.explorer.model.quantization import describe_weights
from bexp.explorer.model.target import BEXP, TRANSFORMERS, unlike_the_config
from bexp.explorer.model.training import Sharding
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import Outcome
from bexp.explorer.records.trial import Trial
from bexp.explorer.request.request import ExplorationRequest

KEEPING_MEMORY = (
    "freed memory stayed with the measured process, as it does with MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_="
    f"{2**40}; a run with glibc's own settings can be slower"
)


def candidate_notes(
    request: ExplorationRequest, candidate: Candidate, report: DeviceReport, whole_model: Trial | None
) -> tuple[str, ...]:
    """Return what a person should know of a candidate and of how it was measured; `whole_model` is its run, if any."""
    notes = [] if candidate.is_whole else [f"execution: {request.execution_of(candidate)}"]
    if request.hf_config is not None and request.target_name == TRANSFORMERS:
        notes += unlike_the_config(request.hf_config, request.quantization)
    if report.parts is not None and report.parts.weights:
        notes.append(f"weights: {describe_weights(report.parts.weights)}")
    if report.parts is not None and (float8 := report.parts.float8) is not None:
        plain = "; experts stay in bfloat16" if report.parts.has_experts else ""
        notes.append(
            f"float8 ({request.training.float8_recipe}): {float8.num_linear} linear layers of decoder layers{plain}. "
            f"At micro-batch 1 a layer's output is off by {float8.output_error:.1%} of its norm in bfloat16, and its "
            f"gradients by {float8.gradient_error:.1%}"
        )
    notes += _named_and_left_out(request, report)
    if request.trainer is not None and request.target_name not in request.runner.targets:
        measured = "bexp's reference layers" if report.parts is None else f"those of {report.parts.measured}"
        notes.append(f"{request.runner.title} runs layers of its own; in their place, {measured} were measured")
    if report.hardware.device_kind == "cpu" and not candidate.is_whole:
        notes.append(KEEPING_MEMORY)
    notes += [*_host_notes(request, candidate, report.parts), *_sharing_notes(request, candidate, report)]
    sharding = request.sharded(candidate.sharding).training.sharding
    if sharding is not Sharding.NONE and request.mode == "train":
        notes.append(f"memory assumes {sharding} over {request.num_devices} devices")
    if whole_model is not None and whole_model.measurement.outcome is not Outcome.OK:
        ran = "not run" if whole_model.measurement.outcome is Outcome.UNSUPPORTED else whole_model.measurement.outcome
        notes.append(f"whole model: {ran}: {whole_model.measurement.reason}")
    elif whole_model is None:
        notes.append("whole model: not run with this candidate")
    if candidate.attention_backend == report.default_attention and not candidate.is_whole:
        owner = "torch" if request.target_name == BEXP else request.target_name
        notes.append(f"attention '{candidate.attention_backend}' is the default of {owner} here")
    return tuple(notes)


def _named_and_left_out(request: ExplorationRequest, report: DeviceReport) -> list[str]:
    """Return a note for each policy, execution and back end that is named beside others and cannot be had here."""
    refused = {} if report.parts is None else report.parts.unavailable
    policies = [policy for policy in request.recompute or () if policy in refused]
    asked: tuple[tuple[str, tuple[str, ...] | None, tuple[BackendSupport, ...]], ...] = (
        ("execution", request.executions, report.executions),
        ("kernels", request.kernels, report.kernels),
        ("loss", request.losses, report.losses),
        ("attention back end", request.attention_backends, report.attention_backends),
        ("expert back end", request.expert_backends, report.expert_backends),
    )
    return [f"recompute '{policy}' is left out: {refused[policy]}" for policy in policies] + [
        f"{what} '{each.name}' {'are' if what == 'kernels' else 'is'} left out: {each.reason}"
        for what, named, usable in asked
        for each in usable
        if not each.usable and each.name in (named or ())
    ]


def _host_notes(request: ExplorationRequest, candidate: Candidate, parts: ModelParts | None) -> Iterator[str]:
    """Yield what lies in the host's memory."""
    if parts is None:
        return
    if candidate.recompute is Recompute.OFFLOAD:
        tokens = candidate.micro_batch_size * parts.seq_length
        expected = tokens * sum(parts.kind(name).saved_bytes_per_token for name in parts.layers)
        yield f"activations: about {expected / GIB:.1f} GiB of the host's memory, pinned, from forward to backward"
    if parts.optimizer_host_bytes is not None:
        yield f"optimizer: {parts.optimizer_host_bytes / GIB:.1f} GiB of the host's memory, where it steps"
        yield ON_HOST_NOTE
    if (known := request.training.optimizer.of_library) is not None and known.is_paged:
        yield PAGED_NOTE


def _sharing_notes(request: ExplorationRequest, candidate: Candidate, report: DeviceReport) -> list[str]:
    """Return notes on context parallelism: that its traffic is included, and which sizes need more devices."""
    notes = []
    if candidate.context_parallel_size > 1:
        notes.append("the keys and values that context parallelism passes between devices are included in the time")
    beyond = [size for size in request.devices.context_parallel_sizes if size > report.hardware.num_devices]
    if beyond:
        sizes = ", ".join(map(str, beyond))
        notes.append(f"context-parallel sizes {sizes} need more devices than the {report.hardware.num_devices} here")
    return notes
