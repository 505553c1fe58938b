"""What is exported: the execution of a training run, in terms that every trainer has a name for.

Nothing that changes what is learnt is part of it: no learning rate, no schedule, no seed. The global batch is the one
that the request states; if it states none, accumulation is left to the trainer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bexp.explorer.exports.exploration import ExportError, ExportSource
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.plan import MeshPlan
from bexp.explorer.records.recommendation import Recommendation
from bexp.explorer.search.trainer_terms import (
    attention_name,
    compute_dtype,
    experts_name,
    find_missing,
    has_chunked_loss,
    is_compiled,
    is_own_code,
    keeps_other_formats,
    measured_precision,
    precision_of,
    sharding_of,
)
from bexp.explorer.spec.candidate import Candidate, Recompute
from bexp.explorer.spec.lengths import Batching
from bexp.explorer.spec.model import DType
from bexp.explorer.spec.quantization import Quantization, describe_weights
from bexp.explorer.spec.request import ExplorationRequest
from bexp.explorer.spec.target import describe_target
from bexp.explorer.spec.trainer import TRAINERS, Trainer, TrainerName
from bexp.explorer.spec.training import LoRASpec, Sharding

if TYPE_CHECKING:
    from bexp.explorer.exports.choice import Choice

ALLOCATOR_VARIABLE = "PYTORCH_ALLOC_CONF"


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """The execution of a training run.

    `batch_size` counts the sequences of a step over all devices; it and `grad_accum_steps` are None if the request
    states no batch. `precision` is `pure` (weights in `dtype`), `autocast` (float32 weights), or `master` (weights in
    `dtype` with float32 master weights). `recompute` is `none`, `full`, or a policy that the trainer has.
    `num_recomputed_layers` layers are recomputed as a whole. `attention` and `experts` have the transformers library's
    names; None is the trainer's own choice. `tokens_per_sequence` is the mean of texts of unequal length, None if they
    were measured full. `header` says, line by line, where it comes from, what was lost and what else must be set.
    """

    model_name: str
    has_experts: bool
    seq_length: int
    dtype: DType
    precision: str
    optimizer: str
    lora: LoRASpec | None
    quantization: Quantization | None
    batch_size: int | None
    num_devices: int
    micro_batch_size: int
    grad_accum_steps: int | None
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
    trainer: Trainer
    tokens_per_sequence: float | None
    header: tuple[str, ...]

    @property
    def allocator(self) -> str | None:
        """The value of PyTorch's variable for its allocator; None for the default."""
        return "expandable_segments:True" if self.expandable_segments else None

    @property
    def has_autocast(self) -> bool:
        """Whether products are computed in half precision under autocast; adapters are in float32."""
        return self.dtype is not DType.FLOAT32 and (self.precision in ("autocast", "upcast") or self.lora is not None)

    @property
    def batching(self) -> Batching | None:
        """What becomes of texts of unequal length; None if every sequence was measured full."""
        return self.request.batching_of_texts

    @property
    def is_own_code(self) -> bool:
        """Whether a person's own target was measured, whose code decides precision, recomputation and kernels."""
        return is_own_code(self.request)

    @property
    def states_length(self) -> bool:
        """Whether the tokens of a sequence are known; a target that a person has written may state none."""
        return self.seq_length > 1

    @property
    def data_parallel_size(self) -> int:
        """Groups of devices that process sequences of their own."""
        return self.mesh.mesh.data if self.mesh is not None else self.num_devices // self.context_parallel_size


def build_settings(name: TrainerName, format_name: str, exploration: ExportSource) -> TrainerSettings:
    """Return what the trainer, exported as `format_name`, is told of an exploration's answer.

    Raises ExportError if there is no answer that a trainer could run.
    """
    request, known, report = exploration.request, exploration.recommendation, exploration.report
    if request is None:
        raise ExportError("Another version of this program stored the request, and this one cannot read it.")
    if request.mode == "eval":
        raise ExportError("The exploration was for evaluation (mode: eval), so that no training run follows from it.")
    if known is None:
        raise ExportError(exploration.missing)
    from bexp.explorer.exports.choice import choose  # noqa: PLC0415 - the search takes long to import, and the list of formats needs none of it

    trainer = TRAINERS[name]
    choice = choose(trainer, exploration, request, known)
    candidate, missing = choice.candidate, choice.missing
    sharding = sharding_of(candidate, request)
    recompute = candidate.recompute
    if "recompute" in missing:
        recompute = trainer.nearest_policy(recompute, _count_recomputed(request, report, Recompute.FULL))
    return TrainerSettings(
        model_name=request.explored.name,
        has_experts=candidate.expert_backend is not None,
        seq_length=_seq_length(request, report),
        dtype=compute_dtype(request, report),
        precision=precision_of(trainer, request, report, candidate),
        optimizer=request.training.optimizer.name,
        lora=request.training.lora,
        quantization=request.quantized,
        batch_size=request.batch_size if choice.plan is None else request.effective_batch_size,
        num_devices=request.num_devices,
        micro_batch_size=candidate.micro_batch_size,
        grad_accum_steps=choice.grad_accum_steps,
        recompute=recompute,
        num_recomputed_layers=_count_recomputed(request, report, recompute),
        attention=None if "attention" in missing else attention_name(candidate, report),
        experts=None if "experts" in missing else experts_name(candidate),
        chunked_loss=has_chunked_loss(candidate, request) and "loss" not in missing,
        compiled_layers=is_compiled(candidate, request) and "execution" not in missing,
        sharding=trainer.nearest_sharding(sharding) if "sharding" in missing else sharding,
        context_parallel_size=candidate.context_parallel_size,
        mesh=choice.plan,
        expandable_segments=request.allocator == "expandable_segments",
        device_kind=report.hardware.device_kind if report is not None else request.device_kind or "cuda",
        candidate=candidate,
        request=request,
        report=report,
        trainer=trainer,
        tokens_per_sequence=None if known.texts is None else known.texts.tokens_per_sequence,
        header=tuple(_header(name, format_name, exploration, request, known, choice)),
    )


def _header(
    name: TrainerName,
    format_name: str,
    exploration: ExportSource,
    request: ExplorationRequest,
    known: Recommendation,
    choice: Choice,
) -> list[str]:
    report, trainer = exploration.report, TRAINERS[name]
    parts = report.parts if report is not None else None
    measured = describe_target(
        request.target_name, parts.target_version if parts else None, parts.class_name if parts else None
    )
    device = f" on {report.hardware.describe()}" if report is not None else ""
    lines = [
        f"bexp export '{format_name}' of exploration {exploration.id}: {request.explored.name}",
        f"measured: target {measured}{device}",
        f"measured candidate: {choice.candidate.describe()}",
        _batch_line(request, choice, _seq_length(request, report)),
    ]
    if choice.plan is not None:
        lines.append(
            f"mesh: {choice.plan.mesh.describe()}; layers of each stage: "
            f"{', '.join(map(str, choice.plan.layers_per_stage))}; exchanges follow from a described fabric"
        )
    lines += _lost(name, request, known, choice, report)
    if is_own_code(request):
        lines.append(
            "precision, recomputation, compilation and kernels were those of your own code: where this file sets one "
            "of them otherwise, keep yours"
        )
    if request.target_name not in trainer.targets:
        lines.append(f"{trainer.title} is not the code that was measured: this promises no tokens/s")
    elif choice.missing:
        lines.append("the settings above are not applied, so this promises no tokens/s")
    elif keeps_other_formats(trainer, request, report, choice.candidate):
        lines.append(f"{trainer.title} keeps other number formats than were measured, so this promises no tokens/s")
    else:
        lines.append(
            f"expect about {choice.tokens_per_second:,.0f} tokens/s of each device; confidence {choice.confidence} out "
            "of 100"
        )
    if not is_own_code(request):
        lines.append(_weights_line(trainer, request, report, choice.candidate))
    if request.explored.seq_length is not None:
        lines.append(_length_line(request, known, choice.candidate))
    lines.append(_allocator_line(request))
    if not exploration.final:
        lines.append(f"provisional: the exploration has not ended; its confidence is {known.confidence} out of 100")
    return lines


def _weights_line(
    trainer: Trainer, request: ExplorationRequest, report: DeviceReport | None, candidate: Candidate
) -> str:
    """Return the number format to make the model in, and what differs from the one that was measured."""
    dtype, precision = compute_dtype(request, report), precision_of(trainer, request, report, candidate)
    measured = measured_precision(request, report)
    made = DType.FLOAT32 if precision == "autocast" else dtype
    if request.quantized is not None:
        return _quantized_line(request.quantized, report, made)
    if request.training.lora is not None:
        return f"weights: measured in {made} with adapters in float32, so make the model with dtype={made}"
    beside = {
        "master": " beside float32 master weights",
        "upcast": " beside norms, embeddings, output layer and routers in float32",
    }.get(precision, "")
    line = f"weights: make the model with dtype={made}"
    if precision == measured:
        return f"{line}, as measured{beside}"
    return (
        f"{line}; {trainer.title} keeps them{beside or ' so'}, and precision '{measured}' was measured: its memory is "
        "counted by formulas"
    )


def _quantized_line(quantized: Quantization, report: DeviceReport | None, made: DType) -> str:
    """Return how quantised weights were loaded, and how many of them there are."""
    bytes_by_kind = report.parts.weights if report is not None and report.parts is not None else ()
    counted = f"; {describe_weights(bytes_by_kind)}" if bytes_by_kind else ""
    return (
        f"weights: measured in {quantized.bits} bits by bitsandbytes, loaded with dtype={made}, with the others and "
        f"the adapters in float32 as peft prepares them{counted}"
    )


def _length_line(request: ExplorationRequest, known: Recommendation, candidate: Candidate) -> str:
    batching, texts = request.batching_of_texts, known.texts
    if batching is None:
        return "texts: every sequence was measured full, as packed texts are; shorter ones need no more memory"
    how = {
        "padded": "padded to the longest of their micro-batch",
        "grouped": "grouped by length, then padded to the longest of their micro-batch",
        "packed": f"packed whole into rows of {request.seq_length} tokens, with positions and attention of their own",
        "token_budget": "whole beside one another in one row, with positions and attention of their own",
    }[batching]
    is_own = texts is not None and candidate.micro_batch_size == known.candidate.micro_batch_size
    share = f" ({texts.padding_share:.0%} padding)" if texts is not None and is_own else ""
    return f"texts: measured {how}{share}, those longer than a sequence cut; tokens/s leave padding out"


def _seq_length(request: ExplorationRequest, report: DeviceReport | None) -> int:
    """Return the tokens of a sequence: a target that a person has written states its own; 1 if it states none."""
    parts = report.parts if report is not None else None
    return parts.seq_length if parts is not None and is_own_code(request) else request.seq_length


def _batch_line(request: ExplorationRequest, choice: Choice, seq_length: int) -> str:
    size, plan = choice.candidate.context_parallel_size, choice.plan
    groups = request.devices.data_parallel_size(size) if plan is None else plan.mesh.data
    shared = f", {size} devices to a sequence" if size > 1 else ""
    tokens = f", of {seq_length} tokens each" if seq_length > 1 else ""  # 1: its target states none
    if choice.grad_accum_steps is None:
        return (
            f"micro_batch_size {choice.candidate.micro_batch_size} on {groups} data-parallel{shared}{tokens}; no "
            f"batch_size was stated, so set the accumulation yourself: tokens/s are those of a step of "
            f"{request.effective_batch_size} sequences"
        )
    return (
        f"batch_size {request.effective_batch_size} = micro_batch_size {choice.candidate.micro_batch_size} x "
        f"{choice.grad_accum_steps} accumulation steps x {groups} data-parallel{shared}{tokens}: "
        "keep the number of devices"
    )


def _lost(
    name: TrainerName, request: ExplorationRequest, known: Recommendation, choice: Choice, report: DeviceReport | None
) -> list[str]:
    """Return what the trainer cannot be told, what it costs, and what is used in its place."""
    lines, trainer, best = [], TRAINERS[name], known.dividing or known
    lost = choice.missing
    if not choice.is_own:
        lost = find_missing(trainer, best.candidate, request, report) | lost
        figure = f"{abs(choice.loss):.1%} {'slower' if choice.loss >= 0 else 'faster'}"
        lines.append(
            f"in place of the recommended {best.candidate.describe()}, which is explored for "
            f"{request.runner.title}: {figure}, confidence {choice.confidence} out of 100 among what {trainer.title} "
            f"can be told; `--trainer {name}` measures it"
        )
    lines += [f"lost: {trainer.title} cannot be told {words}" for words in lost.values()]
    lines += _lost_expert_mode(trainer, known.plan)
    asked = choice.candidate.recompute
    if asked.is_numbered and "recompute" in choice.missing:
        nearest = trainer.nearest_policy(asked, _count_recomputed(request, report, Recompute.FULL))
        lines.append(f"recomputation: '{nearest}' is used in place of '{asked}'")
    if "loss" in choice.missing:
        lines.append(
            "memory: full logits are counted by formulas, and were not measured: explore with training.loss: full"
        )
    wanted = sharding_of(choice.candidate, request)
    if "sharding" in choice.missing:
        lines.append(f"sharding: '{trainer.nearest_sharding(wanted)}' is used in place of '{wanted}'")
    return lines


def _lost_expert_mode(trainer: Trainer, plan: MeshPlan | None) -> list[str]:
    """Return what is used in place of a recommended expert mode that only bexp's kernels have."""
    if plan is None or plan.plain is None:
        return []
    lines = [
        f"lost: {trainer.title} cannot be told expert mode '{plan.mesh.expert_mode}' of the recommended mesh "
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
