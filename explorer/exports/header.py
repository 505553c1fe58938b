"""The lines above an export: the measurement, the settings that the trainer cannot express, and the expected speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.recompute import Recompute, layers_differ, recomputed_layers
from bexp.explorer.exports.exploration import ExportSource
from bexp.explorer.model.amounts import rate_text, slower_text
from bexp.explorer.model.model import DType
from bexp.explorer.model.quantization import Quantization, describe_weights
from bexp.explorer.model.target import describe_target
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.recommendation import Recommendation
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.trainer_terms import (
    compute_dtype,
    find_missing,
    keeps_other_formats,
    lost_formats,
    measured_precision,
    needs_logits,
    precision_of,
)
from bexp.explorer.trainers.document import ALLOCATOR_VARIABLE
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
        lines.append(f"{trainer.title} is not the code that was measured: this promises no tokens/s")
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
    made = DType.FLOAT32 if precision == "autocast" else dtype
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
