"""Flags of torchtitan's trainer, as an array for a shell, by the names of release 0.3 and of the main line.

The main line counts tokens where 0.3 counts sequences. The policy of activation checkpointing is a subcommand of the
parser, so it stands last.
"""

from __future__ import annotations

from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.dimensions.parallelism import Parallelism, Schedule
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.model import DType
from bexp.explorer.model.training import Sharding
from bexp.explorer.trainers.document import (
    ExportDocument,
    ExportError,
    TrainerSettings,
    gathering_notes,
    other_optimizer_notes,
    shell_export,
)
from bexp.explorer.trainers.trainer import MODEL_PARALLELISM, Trainer, expresses

VARIABLE = "TORCHTITAN_FLAGS"

Flags = list[tuple[str, ...]]


def render_release(settings: TrainerSettings) -> ExportDocument:
    """Return the flags of torchtitan 0.3."""
    local, piped = settings.micro_batch_size, settings.has_pipeline
    batch: Flags = [("--training.local_batch_size", str(local * (settings.grad_accum_steps or 1) if piped else local))]
    if settings.batch_size is not None:
        batch.append(("--training.global_batch_size", str(settings.batch_size)))
    if settings.states_length:
        batch.append(("--training.seq_len", str(settings.seq_length)))
    if piped:  # a local batch is cut into the micro-batches of the pipeline
        batch.append(("--parallelism.pipeline_parallel_microbatch_size", str(local)))
    return _render(settings, batch)


def render_main(settings: TrainerSettings) -> ExportDocument:
    """Return the flags of torchtitan's main line.

    Raises ExportError if the target states no length of its sequences, because this version counts tokens.
    """
    if settings.is_own_code and settings.seq_length == 1:
        raise ExportError("torchtitan's main line counts tokens, and the target states no seq_length.")
    batch: Flags = [
        ("--training.num_tokens_per_microbatch_per_dp_rank", str(settings.micro_batch_size * settings.seq_length)),
        ("--training.max_context_length", str(settings.seq_length)),
    ]
    if settings.batch_size is not None:
        tokens = settings.batch_size * settings.seq_length
        batch.append(("--training.num_tokens_per_train_step", str(tokens)))
    return _render(settings, batch)


def _render(settings: TrainerSettings, batch: Flags) -> ExportDocument:
    sharded = settings.sharding is not Sharding.NONE
    flags = [
        *batch,
        ("--training.disable_cuda_graphs",),
        *_dtype_flags(settings),
        ("--parallelism.data_parallel_replicate_degree", str(1 if sharded else settings.data_parallel_size)),
        ("--parallelism.data_parallel_shard_degree", str(settings.data_parallel_size if sharded else 1)),
        ("--parallelism.context_parallel_degree", str(settings.context_parallel_size)),
    ]
    flags += _parallelism_flags(settings.parallelism)
    if sharded:
        policy = "always" if settings.sharding is Sharding.ZERO3 else "never"
        flags.append(("--parallelism.fsdp_reshard_after_forward", policy))
    if settings.compiled_layers:
        flags += [("--compile.enable",), ("--compile.components", "model")]
    else:
        flags.append(("--compile.no-enable",))
    flags.append((f"activation_checkpoint:{'full' if settings.recompute is Recompute.FULL else 'none'}",))
    notes = [f'run: ... --module MODULE --config CONFIG "${{{VARIABLE}[@]}}", with a config of this model']
    notes += other_optimizer_notes(settings)
    if not settings.has_pipeline:  # a pipeline runs all micro-batches of a step as one batch
        notes += gathering_notes(settings)
        if not sharded and settings.data_parallel_size > 1 and settings.grad_accum_steps != 1:
            notes.append(
                "communication: gradients are reduced in each accumulation step, and not once a step as measured"
            )
    else:
        stages = ", ".join(map(str, settings.layers_per_stage))
        notes.append(f"layers of each stage: {stages}; set parallelism.module_fqns_per_model_part in the config")
    if settings.chunked_loss:
        notes.append("loss: measured in chunks, so keep ChunkedLossWrapper in the config, as torchtitan's own have it")
    return shell_export(settings, VARIABLE, flags, notes)


def _dtype_flags(settings: TrainerSettings) -> Flags:
    """Return the format of the weights. torchtitan has no master weights: float32 ones have the same bytes."""
    if settings.is_own_code or settings.dtype is DType.FLOAT16:
        return []
    return [("--training.dtype", str(settings.dtype if settings.precision == "pure" else DType.FLOAT32))]


def _parallelism_flags(sizes: Parallelism | None) -> Flags:
    if sizes is None:
        return []
    flags: Flags = [("--parallelism.tensor_parallel_degree", str(sizes.tensor))]
    if sizes.pipeline > 1:
        schedule = "Interleaved1F1B" if sizes.schedule is Schedule.INTERLEAVED else "1F1B"
        flags.append(("--parallelism.pipeline_parallel_degree", str(sizes.pipeline)))
        flags.append(("--parallelism.pipeline_parallel_schedule", schedule))
    if sizes.expert > 1:
        flags.append(("--parallelism.expert_parallel_degree", str(sizes.expert)))
    return flags


TORCHTITAN = Trainer(
    name="torchtitan",
    title="torchtitan",
    formats={"torchtitan": render_release, "torchtitan-main": render_main},
    expresses=expresses(
        context_parallel={"zigzag"},
        parallelism={MODEL_PARALLELISM},
        loss={"library", "chunked"},
        execution={Execution.EAGER, Execution.COMPILE},
        adapters=(),
        batching=(),
    ),
    allocator="expandable_segments",  # its run_train.sh sets it
)
