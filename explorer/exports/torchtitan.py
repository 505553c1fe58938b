"""Flags of torchtitan's trainer, as an array for a shell, by the names of release 0.3 and of the main line.

The main line counts tokens where 0.3 counts sequences. The policy of activation checkpointing is a subcommand of the
parser, so it stands last.
"""

from __future__ import annotations

from bexp.explorer.exports.document import ExportDocument, shell_export
from bexp.explorer.exports.exchanges import gathering_notes
from bexp.explorer.exports.exploration import ExportError
from bexp.explorer.exports.framework import Framework
from bexp.explorer.exports.plan import Plan
from bexp.explorer.records.plan import MeshPlan
from bexp.explorer.spec.candidate import Recompute
from bexp.explorer.spec.mesh import Schedule
from bexp.explorer.spec.training import Sharding

FRAMEWORK = Framework(
    title="torchtitan",
    layouts=frozenset({"zigzag"}),
    schedules=frozenset({Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED}),
    chunked_loss=True,
    compiled_layers=True,
)
SCHEDULES = {Schedule.INTERLEAVED: "Interleaved1F1B"}
"""torch's names of the schedules that are not 1F1B."""
VARIABLE = "TORCHTITAN_FLAGS"

Flags = list[tuple[str, ...]]


def render_release(plan: Plan) -> ExportDocument:
    """Return the flags of torchtitan 0.3."""
    local, piped = plan.micro_batch_size, plan.mesh is not None and plan.mesh.mesh.pipeline > 1
    batch: Flags = [
        ("--training.local_batch_size", str(local * plan.grad_accum_steps if piped else local)),
        ("--training.global_batch_size", str(plan.batch_size)),
    ]
    if piped:  # a local batch is cut into the micro-batches of the pipeline
        batch.append(("--parallelism.pipeline_parallel_microbatch_size", str(local)))
    return _render(plan, batch)


def render_main(plan: Plan) -> ExportDocument:
    """Return the flags of torchtitan's main line.

    Raises ExportError if the target states no length of its sequences, because this version counts tokens.
    """
    if plan.is_own_code and plan.seq_length == 1:
        raise ExportError("torchtitan's main line counts tokens, and the target states no seq_length.")
    batch: Flags = [
        ("--training.num_tokens_per_microbatch_per_dp_rank", str(plan.micro_batch_size * plan.seq_length)),
        ("--training.num_tokens_per_train_step", str(plan.batch_size * plan.seq_length)),
    ]
    return _render(plan, batch)


def _render(plan: Plan, batch: Flags) -> ExportDocument:
    sharded = plan.sharding is not Sharding.NONE
    flags = [
        *batch,
        ("--training.disable_cuda_graphs",),
        ("--parallelism.data_parallel_replicate_degree", str(1 if sharded else plan.data_parallel_size)),
        ("--parallelism.data_parallel_shard_degree", str(plan.data_parallel_size if sharded else 1)),
        ("--parallelism.context_parallel_degree", str(plan.context_parallel_size)),
    ]
    flags += _mesh_flags(plan.mesh)
    if sharded:
        policy = "always" if plan.sharding is Sharding.ZERO3 else "never"
        flags.append(("--parallelism.fsdp_reshard_after_forward", policy))
    if plan.compiled_layers:
        flags += [("--compile.enable",), ("--compile.components", "model")]
    else:
        flags.append(("--compile.no-enable",))
    flags.append((f"activation_checkpoint:{'full' if plan.recompute is Recompute.FULL else 'none'}",))
    notes = [f'run: ... --module MODULE --config CONFIG "${{{VARIABLE}[@]}}", with a config of this model']
    piped = plan.mesh is not None and plan.mesh.mesh.pipeline > 1
    if not piped:  # a pipeline runs all micro-batches of a step as one batch
        notes += gathering_notes(plan)
        if not sharded and plan.data_parallel_size > 1 and plan.grad_accum_steps > 1:
            notes.append(
                "communication: gradients are reduced in each accumulation step, and not once a step as measured"
            )
    if plan.mesh is not None and piped:
        stages = ", ".join(map(str, plan.mesh.layers_per_stage))
        notes.append(f"layers of each stage: {stages}; set parallelism.module_fqns_per_model_part in the config")
    if plan.chunked_loss:
        notes.append("loss: measured in chunks, so keep ChunkedLossWrapper in the config, as torchtitan's own have it")
    return shell_export(plan, VARIABLE, flags, notes)


def _mesh_flags(plan: MeshPlan | None) -> Flags:
    if plan is None:
        return []
    mesh = plan.mesh
    flags: Flags = [("--parallelism.tensor_parallel_degree", str(mesh.tensor))]
    if mesh.pipeline > 1:
        schedule = SCHEDULES.get(mesh.schedule or Schedule.ONE_F_ONE_B, "1F1B")
        flags.append(("--parallelism.pipeline_parallel_degree", str(mesh.pipeline)))
        flags.append(("--parallelism.pipeline_parallel_schedule", schedule))
    if mesh.expert > 1:
        flags.append(("--parallelism.expert_parallel_degree", str(mesh.expert)))
    return flags
