"""The file of an answer in a format: the lines above it, and the settings in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bexp.explorer.dimensions.attention import attention_name
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.experts import experts_name
from bexp.explorer.dimensions.loss import LOSS, LOSSES
from bexp.explorer.dimensions.recompute import Recompute, layers_differ, recomputed_layers
from bexp.explorer.exports.exploration import ExportSource
from bexp.explorer.model.amounts import rate_text, slower_text
from bexp.explorer.model.model import DType
from bexp.explorer.model.quantization import Quantization, describe_weights
from bexp.explorer.model.target import describe_target
from bexp.explorer.model.training import LINEAR_MODULES, TrainingSpec
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.recommendation import Recommendation
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.trainer_terms import (
    compute_dtype,
    find_missing,
    halves_experts,
    keeps_other_formats,
    lost_formats,
    measured_precision,
    needs_logits,
    precision_of,
)
from bexp.explorer.trainers.document import ALLOCATOR_VARIABLE, ExportDocument, ExportError, TrainerSettings
from bexp.explorer.trainers.registry import find_format
from bexp.explorer.trainers.trainer import Trainer

if TYPE_CHECKING:
    from bexp.explorer.exports.choice import Choice


def header_lines(
    trainer: Trainer,
    format_name: str,
    exploration: ExportSource,
    request: ExplorationRequest,
    known: Recommendation,
    choice: Choice,
) -> list[str]:
    """Return the lines above an export: the measurement, the settings that are left out, and the expected speed."""
    report = exploration.report
    parts = report.parts if report is not None else None
    measured = describe_target(
        request.target_name, parts.target_version if parts else None, parts.class_name if parts else None
    )
    device = f" on {report.hardware.describe()}" if report is not None else ""
    lines = [
        f"bexp export '{format_name}' of exploration {exploration.id}: {request.explored.name}",
        f"measured: target {measured}{device}",
        f"measured candidate: {choice.candidate.describe()}",
        _batch_line(request, choice, seq_length_of(request, report)),
    ]
    if request.num_query_groups is not None:
        lines.append(
            f"model: this is for num_query_groups={choice.candidate.num_query_groups}, so make the model with it"
        )
    if choice.plan is not None:
        lines.append(choice.plan.header_line())
    lines += _lost(trainer, request, known, choice, report)
    if request.is_own_code:
        lines.append(
            "precision, recomputation, compilation and kernels were those of your own code: where this file sets one "
            "of them otherwise, keep yours"
        )
        if choice.candidate.settings is not None:
            lines.append(f"your target's setting: {choice.candidate.settings}")
    if request.target_name not in trainer.targets:
        other = (
            "your own code was measured"
            if request.is_own_code
            else f"{trainer.title} is not the code that was measured"
        )
        lines.append(f"{other}: this promises no tokens/s")
    elif trainer.own_loss is not None and not request.is_own_code:
        lines.append(f"{trainer.title} {trainer.own_loss}, and another loss was measured: this promises no tokens/s")
    elif choice.missing:
        lines.append("the settings above are not applied, so this promises no tokens/s")
    elif keeps_other_formats(trainer, request, report, choice.candidate):
        lines.append(f"{trainer.title} keeps other number formats than were measured, so this promises no tokens/s")
    else:
        lines.append(
            f"expect about {rate_text(choice.tokens_per_second)} of each device; confidence {choice.confidence} out "
            "of 100"
        )
    if not request.is_own_code:
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
    """Return the number format of the model, and its difference from the measured one."""
    dtype, precision = compute_dtype(request, report), precision_of(trainer, request, report, candidate)
    measured = measured_precision(request, report)
    is_wide = precision == "autocast" or (precision == "master" and trainer.has_deepspeed)
    made = DType.FLOAT32 if is_wide else dtype
    if request.quantized is not None:
        return _quantized_line(request.quantized, report, made)
    if request.training.lora is not None:
        return f"weights: measured in {made} with adapters in float32, so make the model with dtype={made}"
    others = {
        "master": " with float32 master weights",
        "upcast": " with norms, embeddings, output layer and routers in float32",
    }.get(precision, "")
    line = f"weights: make the model with dtype={made}"
    if precision == measured:
        return f"{line}, as measured{others}"
    return (
        f"{line}; {trainer.title} keeps them{others or ' so'}, and precision '{measured}' was measured: its memory is "
        "counted by formulas"
    )


def _quantized_line(quantized: Quantization, report: DeviceReport | None, made: DType) -> str:
    """Return the form in which quantised weights were loaded, and their number of bytes."""
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
        "token_budget": "whole one after another in one row, with positions and attention of their own",
    }[batching]
    is_own = texts is not None and candidate.micro_batch_size == known.candidate.micro_batch_size
    share = f" ({texts.padding_share:.0%} padding)" if texts is not None and is_own else ""
    return f"texts: measured {how}{share}, those longer than a sequence cut; tokens/s leave padding out"


def nearest_policy(
    trainer: Trainer, policy: Recompute, request: ExplorationRequest, report: DeviceReport | None
) -> Recompute:
    """Return the policy of a trainer in place of one that it cannot express, so that a step still fits."""
    number = len(recomputed_indices(request, report, Recompute.FULL))
    return trainer.nearest_policy(policy, number, layers_differ=layers_differ(request.model, report))


def seq_length_of(request: ExplorationRequest, report: DeviceReport | None) -> int:
    """Return the tokens of a sequence: a person's own target states its own; 1 if it states none."""
    parts = report.parts if report is not None else None
    return parts.seq_length if parts is not None and request.is_own_code else request.seq_length


def _batch_line(request: ExplorationRequest, choice: Choice, seq_length: int) -> str:
    size, plan = choice.candidate.context_parallel_size, choice.plan
    groups = request.devices.data_parallel_size(size) if plan is None else plan.parallelism.data
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
    trainer: Trainer, request: ExplorationRequest, known: Recommendation, choice: Choice, report: DeviceReport | None
) -> list[str]:
    """Return the settings that the trainer cannot express, their worth, and their replacements."""
    lines, best = [], known.for_batch
    lost = choice.missing
    if not choice.is_own:
        lost = find_missing(trainer, best.candidate, request, report) | lost
        lines.append(
            f"in place of the recommended {best.candidate.describe()}, which is explored for "
            f"{request.runner.title}: {slower_text(choice.loss)}, confidence {choice.confidence} out of 100 among what "
            f"{trainer.title} can express; `--trainer {trainer.name}` measures it"
        )
    lines += [f"lost: {trainer.title} cannot express {words}" for words in lost.values()]
    formats = lost_formats(trainer, request, report, choice.candidate)
    lines += [
        f"lost: {trainer.title} cannot express {words}; its own formats are counted by formulas" for words in formats
    ]
    lines += [] if known.plan is None else known.plan.lost_lines(trainer.title)
    asked = choice.candidate.recompute
    if "recompute" in choice.missing:
        nearest = nearest_policy(trainer, asked, request, report)
        lines.append(f"recomputation: '{nearest}' is used in place of '{asked}'")
    if needs_logits(trainer, choice.candidate, request):
        lines.append(
            "memory: full logits are counted by formulas, and were not measured: explore with training.loss: full"
        )
    wanted = choice.candidate.sharding or request.training.sharding
    if "sharding" in choice.missing:
        lines.append(f"sharding: '{trainer.nearest_sharding(wanted)}' is used in place of '{wanted}'")
    return lines


def _allocator_line(request: ExplorationRequest) -> str:
    if request.allocator == "expandable_segments":
        setting = f"{ALLOCATOR_VARIABLE}=expandable_segments:True"
        return f"allocator: measured with {setting}, which must be set before CUDA starts"
    return f"allocator: measured with PyTorch's default, so leave {ALLOCATOR_VARIABLE} unset"


def recomputed_indices(
    request: ExplorationRequest, report: DeviceReport | None, recompute: Recompute
) -> tuple[int, ...]:
    """Return the layers that were measured with recomputation as a whole; none if their number is not known."""
    known = request.explored.recomputed_layers(recompute)
    if known is None and report is not None and report.parts is not None:
        known = recomputed_layers(report.parts, recompute)
    return tuple(index for index, is_recomputed in enumerate(known or ()) if is_recomputed)


def export(name: str, exploration: ExportSource) -> ExportDocument:
    """Return the file of an exploration's answer in the format called `name`.

    Raises UnknownFormatError if there is no such format, ExportError if there is no answer that a trainer could run.
    """
    known = find_format(name)
    return known.render(build_settings(known.trainer, name, exploration))


def build_settings(trainer: Trainer, format_name: str, exploration: ExportSource) -> TrainerSettings:
    """Return the settings for a trainer from an exploration's answer, for an export as `format_name`.

    Raises ExportError if there is no answer that a trainer could run.
    """
    request, known, report = exploration.request, exploration.recommendation, exploration.report
    if request is None:
        raise ExportError("Another version of this program stored the request, and this one cannot read it.")
    if request.mode == "eval":
        raise ExportError("The exploration was for evaluation (mode: eval), so that no training run follows from it.")
    if known is None:
        raise ExportError(exploration.missing)
    request = request if report is None else report.commanded(request)
    from bexp.explorer.exports.choice import choose  # noqa: PLC0415 - the search takes long to import, and the list of formats needs none of it

    choice = choose(trainer, exploration, request, known)
    candidate, missing, plan = choice.candidate, choice.missing, choice.plan
    sharding, recompute = candidate.sharding or request.training.sharding, candidate.recompute
    loss = LOSS.asked_of_trainer(candidate, request.space.place)
    if "recompute" in missing:
        recompute = nearest_policy(trainer, recompute, request, report)
    seq_length = seq_length_of(request, report)
    return TrainerSettings(
        candidate=candidate,
        training=request.training if trainer.lists_linear else _with_named_modules(request.training, report),
        title=trainer.title,
        header=tuple(header_lines(trainer, format_name, exploration, request, known, choice)),
        target_name=request.target_name,
        is_own_code=request.is_own_code,
        model=request.explored.as_fields(seq_length),
        request=request.model_dump(mode="json"),
        hardware=None if report is None else report.hardware,
        seq_length=seq_length,
        dtype=compute_dtype(request, report),
        precision=precision_of(trainer, request, report, candidate),
        widens_shards=trainer.has_deepspeed and precision_of(trainer, request, report, candidate) == "master",
        quantization=request.quantized,
        halves_experts=halves_experts(trainer, report),
        batch_size=None if choice.grad_accum_steps is None else request.effective_batch_size,
        num_devices=request.num_devices,
        device_kind=report.hardware.device_kind if report is not None else request.device_kind or "cuda",
        grad_accum_steps=choice.grad_accum_steps,
        batching=request.batching_of_texts,
        tokens_per_sequence=None if known.texts is None else known.texts.tokens_per_sequence,
        recompute=recompute,
        recomputed_layers=recomputed_indices(request, report, recompute),
        attention=None if "attention" in missing else attention_name(candidate, report),
        experts=None if "experts" in missing else experts_name(candidate),
        chunked_loss=not LOSSES[trainer.nearest_loss(loss)].holds_logits,
        compiled_layers=request.execution_of(candidate).compiles and "execution" not in missing,
        sharding=trainer.nearest_sharding(sharding) if "sharding" in missing else sharding,
        context_parallel_size=candidate.context_parallel_size,
        parallelism=None if plan is None else plan.parallelism,
        layers_per_stage=() if plan is None else plan.layers_per_stage,
        varies_query_groups=request.num_query_groups is not None,
        expandable_segments=request.allocator == "expandable_segments",
    )


def _with_named_modules(training: TrainingSpec, report: DeviceReport | None) -> TrainingSpec:
    """Return the training with the names of the linear layers that were adapted."""
    lora, parts = training.lora, None if report is None else report.parts
    if lora is None or lora.target_modules != LINEAR_MODULES or parts is None or not parts.adapted:
        return training
    others = {name.rpartition(".")[0].rpartition(".")[2] for name in lora.target_parameters or ()}
    named = tuple(name for name in parts.adapted if name not in {*others, *(lora.modules_to_save or ())})
    return training.model_copy(update={"lora": lora.model_copy(update={"target_modules": named})})
