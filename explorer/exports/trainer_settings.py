"""What is exported: the execution of a training run, in terms that every framework has a name for.

Nothing that changes what is learnt is part of it: no learning rate, no schedule, no seed, no optimizer. The global
batch is the one that the request states.
"""

from __future__ import annotations

from dataclasses import dataclass

from bexp.explorer.exports.choice import Choice, choose
from bexp.explorer.exports.exploration import ExportError, ExportSource
from bexp.explorer.exports.framework import (
    Framework,
    attention_name,
    compute_dtype,
    experts_name,
    find_missing,
    has_chunked_loss,
    is_compiled,
    sharding_of,
)
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.plan import MeshPlan
from bexp.explorer.records.recommendation import Recommendation
from bexp.explorer.spec.candidate import Candidate, Recompute
from bexp.explorer.spec.model import DType
from bexp.explorer.spec.request import ExplorationRequest
from bexp.explorer.spec.target import BEXP, TRANSFORMERS, describe_target
from bexp.explorer.spec.training import Sharding

ALLOCATOR_VARIABLE = "PYTORCH_ALLOC_CONF"


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """The execution of a training run.

    `batch_size` counts the sequences of a step over all devices. `recompute` is `none`, `full`, or a policy that the
    framework has. `num_recomputed_layers` layers are recomputed as a whole. `attention` and `experts` have the
    transformers library's names; None is the framework's own choice. `header` says, line by line, where it comes from,
    what was lost and what else must be set.
    """

    model_name: str
    has_experts: bool
    seq_length: int
    dtype: DType
    autocast: bool
    batch_size: int
    num_devices: int
    micro_batch_size: int
    grad_accum_steps: int
    recompute: Recompute
    num_recomputed_layers: int
    attention: str | None
    experts: str | None
    chunked_loss: bool
    compiled_layers: bool
    sharding: Sharding
    context_parallel_size: int
    mesh: MeshPlan | None
    expandable_segments: bool
    device_kind: str
    candidate: Candidate
    request: ExplorationRequest
    report: DeviceReport | None
    header: tuple[str, ...]

    @property
    def allocator(self) -> str | None:
        """The value of PyTorch's variable for its allocator; None for the default."""
        return "expandable_segments:True" if self.expandable_segments else None

    @property
    def is_own_code(self) -> bool:
        """Whether a person's own target was measured, whose code decides precision, recomputation and kernels."""
        return is_own_code(self.request)

    @property
    def data_parallel_size(self) -> int:
        """Groups of devices that process sequences of their own."""
        return self.mesh.mesh.data if self.mesh is not None else self.num_devices // self.context_parallel_size


def build_settings(framework: Framework, name: str, exploration: ExportSource) -> TrainerSettings:
    """Return what `framework`, exported as `name`, can be told of an exploration's answer.

    Raises ExportError if there is no answer that a trainer could run.
    """
    request, known, report = exploration.request, exploration.recommendation, exploration.report
    if request is None:
        raise ExportError("Another version of this program stored the request, and this one cannot read it.")
    if request.mode == "eval":
        raise ExportError("The exploration was for evaluation (mode: eval), so that no training run follows from it.")
    if known is None:
        raise ExportError(exploration.missing)
    choice = choose(framework, request, report, known, exploration.trials)
    candidate, missing = choice.candidate, choice.missing
    sharding = sharding_of(candidate, request)
    recompute = candidate.recompute
    if "recompute" in missing:
        recompute = framework.nearest_policy(recompute, _count_recomputed(request, report, Recompute.FULL))
    return TrainerSettings(
        model_name=request.explored.name,
        has_experts=candidate.expert_backend is not None,
        seq_length=_seq_length(request, report),
        dtype=compute_dtype(request, report),
        autocast=request.training.precision == "autocast",
        batch_size=request.batch_size,
        num_devices=request.num_devices,
        micro_batch_size=candidate.micro_batch_size,
        grad_accum_steps=choice.grad_accum_steps,
        recompute=recompute,
        num_recomputed_layers=_count_recomputed(request, report, recompute),
        attention=None if "attention" in missing else attention_name(candidate, report),
        experts=None if "experts" in missing else experts_name(candidate),
        chunked_loss=has_chunked_loss(candidate, request) and "loss" not in missing,
        compiled_layers=is_compiled(candidate, request) and "execution" not in missing,
        sharding=framework.nearest_sharding(sharding) if "sharding" in missing else sharding,
        context_parallel_size=choice.context_parallel_size,
        mesh=choice.plan,
        expandable_segments=request.allocator == "expandable_segments",
        device_kind=report.hardware.device_kind if report is not None else request.device_kind or "cuda",
        candidate=candidate,
        request=request,
        report=report,
        header=tuple(_header(framework, name, exploration, request, known, choice)),
    )


def _header(
    framework: Framework,
    name: str,
    exploration: ExportSource,
    request: ExplorationRequest,
    known: Recommendation,
    choice: Choice,
) -> list[str]:
    report = exploration.report
    parts = report.parts if report is not None else None
    measured = describe_target(
        request.target_name, parts.target_version if parts else None, parts.class_name if parts else None
    )
    device = f" on {report.hardware.describe()}" if report is not None else ""
    lines = [
        f"bexp export '{name}' of exploration {exploration.id}: {request.explored.name}",
        f"measured: target {measured}{device}",
        f"measured candidate: {choice.candidate.describe()}",
        _batch_line(request, choice, _seq_length(request, report)),
    ]
    if choice.plan is not None:
        lines.append(
            f"mesh: {choice.plan.mesh.describe()}; layers of each stage: "
            f"{', '.join(map(str, choice.plan.layers_per_stage))}; exchanges follow from a described fabric"
        )
    lines += _lost(framework, request, known, choice, report)
    if is_own_code(request):
        lines.append(
            "precision, recomputation, compilation and kernels were those of your own code: where this file sets one "
            "of them otherwise, keep yours"
        )
    if request.target_name not in framework.targets:
        lines.append(f"{framework.title} is not the code that was measured: this promises no tokens/s")
    elif choice.missing:
        lines.append("the settings above are not applied, so this promises no tokens/s")
    else:
        lines.append(f"expect about {choice.tokens_per_second:,.0f} tokens/s of each device")
    if request.target_name == TRANSFORMERS and request.target_name in framework.targets:
        lines.append(_weights_line(request, report))
    lines.append(_allocator_line(request))
    if not exploration.final:
        lines.append(f"provisional: the exploration has not ended; its confidence is {known.confidence} out of 100")
    return lines


def _weights_line(request: ExplorationRequest, report: DeviceReport | None) -> str:
    """Return the number format that the weights were measured in: the script that makes the model decides it."""
    autocast = request.training.precision == "autocast"
    dtype = DType.FLOAT32 if autocast else compute_dtype(request, report)
    return f"weights: measured in {dtype}, so make the model with dtype={dtype}"


def is_own_code(request: ExplorationRequest) -> bool:
    """Whether the target is one that a person has written."""
    return request.target_name not in (BEXP, TRANSFORMERS)


def _seq_length(request: ExplorationRequest, report: DeviceReport | None) -> int:
    """Return the tokens of a sequence: a target that a person has written states its own; 1 if it states none."""
    parts = report.parts if report is not None else None
    return parts.seq_length if parts is not None and is_own_code(request) else request.seq_length


def _batch_line(request: ExplorationRequest, choice: Choice, seq_length: int) -> str:
    size, plan = choice.context_parallel_size, choice.plan
    groups = request.devices.data_parallel_size(size) if plan is None else plan.mesh.data
    shared = f", {size} devices to a sequence" if size > 1 else ""
    tokens = f", of {seq_length} tokens each" if seq_length > 1 else ""  # 1: its target states none
    return (
        f"batch_size {request.batch_size} = micro_batch_size {choice.candidate.micro_batch_size} x "
        f"{choice.grad_accum_steps} accumulation steps x {groups} data-parallel{shared}{tokens}: "
        "keep the number of devices"
    )


def _lost(
    framework: Framework,
    request: ExplorationRequest,
    known: Recommendation,
    choice: Choice,
    report: DeviceReport | None,
) -> list[str]:
    """Return what the framework cannot be told, what it costs, and whether the memory still holds."""
    lines = []
    best = known.dividing or known
    lost = choice.missing
    if not choice.is_stored_best:
        lost = find_missing(framework, best.candidate, request, report) | lost
        rate = best.expected_tokens_per_second if isinstance(best, Recommendation) else best.tokens_per_second
        loss = 1.0 - choice.tokens_per_second / rate
        lines.append(
            f"in place of the recommended {best.candidate.describe()}: where both were measured, that costs "
            f"{max(0.0, loss):.0%} of the tokens/s"
        )
    lines += [f"lost: {framework.title} cannot be told {words}" for words in lost.values()]
    lines += _lost_expert_mode(framework, known.plan)
    asked = choice.candidate.recompute
    if asked.is_numbered and "recompute" in choice.missing:
        nearest = framework.nearest_policy(asked, _count_recomputed(request, report, Recompute.FULL))
        lines.append(f"recomputation: '{nearest}' is used in place of '{asked}'")
    if choice.fits_full_logits is False:
        lines.append("memory: full logits are not expected to fit beside it; explore again with training.loss: full")
    elif "loss" in choice.missing:
        lines.append("memory: full logits need more than was measured; explore with training.loss: full to be sure")
    if {"bta_tile", "context_parallel"} & choice.missing.keys():
        lines.append("memory: without them a step needs more than was measured, so that it may not fit")
    wanted = sharding_of(choice.candidate, request)
    if "sharding" in choice.missing:
        lines.append(f"sharding: '{framework.nearest_sharding(wanted)}' is used in place of '{wanted}'")
    return lines


def _lost_expert_mode(framework: Framework, plan: MeshPlan | None) -> list[str]:
    """Return what is used in place of a recommended expert mode that only bexp's kernels have."""
    if plan is None or plan.plain is None:
        return []
    lines = [
        f"lost: {framework.title} cannot be told expert mode '{plan.mesh.expert_mode}' of the recommended mesh "
        f"({plan.mesh.describe()}), which is planned to be {plan.plain.gain:.2f}x as fast"
    ]
    if not plan.plain.fits:
        lines.append("memory: expert mode 'plain' is not expected to fit; explore again with expert_mode plain")
    return lines


def _allocator_line(request: ExplorationRequest) -> str:
    if request.allocator == "expandable_segments":
        setting = f"{ALLOCATOR_VARIABLE}=expandable_segments:True"
        return f"allocator: measured with {setting}, which must be set before CUDA starts"
    return f"allocator: measured with PyTorch's default, so leave {ALLOCATOR_VARIABLE} unset"


def _count_recomputed(request: ExplorationRequest, report: DeviceReport | None, recompute: Recompute) -> int:
    """Return the number of layers that are recomputed as a whole; 0 if the number of layers is not known."""
    known = request.explored.count_recomputed(recompute)
    if known is not None or report is None or report.parts is None or not report.parts.layers:
        return known or 0
    return sum(report.parts.recomputed_layers(recompute))
