"""The file of an answer in a format, and the settings in it."""

from __future__ import annotations

from bexp.explorer.dimensions.attention import attention_name
from bexp.explorer.dimensions.experts import experts_name
from bexp.explorer.dimensions.loss import LOSS, LOSSES
from bexp.explorer.exports.exploration import ExportSource
from bexp.explorer.exports.header import header_lines, nearest_policy, recomputed_indices, seq_length_of
from bexp.explorer.model.training import LINEAR_MODULES, TrainingSpec
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.search.trainer_terms import (
    compute_dtype,
    halves_experts,
    precision_of,
)
from bexp.explorer.trainers.document import ExportDocument, ExportError
from bexp.explorer.trainers.registry import find_format
from bexp.explorer.trainers.settings import TrainerSettings
from bexp.explorer.trainers.trainer import Trainer


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
