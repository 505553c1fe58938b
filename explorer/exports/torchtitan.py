"""Flags of torchtitan's trainer, as an array for a shell, by the names of release 0.3 and of the main line.

The main line counts tokens where 0.3 counts sequences. The policy of activation checkpointing is a subcommand of the
parser, so it stands last.
"""

from __future__ import annotations

from explorer.exports.document import Export, shell_export
from explorer.exports.framework import Framework
from explorer.exports.plan import Plan
from explorer.spec.candidate import Recompute
from explorer.spec.training import Sharding

FRAMEWORK = Framework(title="torchtitan", layouts=frozenset({"zigzag"}), chunked_loss=True, compiled_layers=True)
VARIABLE = "TORCHTITAN_FLAGS"

Flags = list[tuple[str, ...]]


def render_release(plan: Plan) -> Export:
    """Return the flags of torchtitan 0.3."""
    batch: Flags = [
        ("--training.local_batch_size", str(plan.micro_batch_size)),
        ("--training.global_batch_size", str(plan.batch_size)),
    ]
    return _render(plan, batch)


def render_main(plan: Plan) -> Export:
    """Return the flags of torchtitan's main line."""
    batch: Flags = [
        ("--training.num_tokens_per_microbatch_per_dp_rank", str(plan.micro_batch_size * plan.seq_length)),
        ("--training.num_tokens_per_train_step", str(plan.batch_size * plan.seq_length)),
    ]
    return _render(plan, batch)


def _render(plan: Plan, batch: Flags) -> Export:
    sharded = plan.sharding is not Sharding.NONE
    flags = [
        *batch,
        ("--training.disable_cuda_graphs",),
        ("--parallelism.data_parallel_replicate_degree", str(1 if sharded else plan.data_parallel_size)),
        ("--parallelism.data_parallel_shard_degree", str(plan.data_parallel_size if sharded else 1)),
        ("--parallelism.context_parallel_degree", str(plan.context_parallel_size)),
    ]
    if sharded:
        policy = "always" if plan.sharding is Sharding.ZERO3 else "never"
        flags.append(("--parallelism.fsdp_reshard_after_forward", policy))
    if plan.compiled_layers:
        flags += [("--compile.enable",), ("--compile.components", "model")]
    else:
        flags.append(("--compile.no-enable",))
    flags.append((f"activation_checkpoint:{'full' if plan.recompute is Recompute.FULL else 'none'}",))
    notes = [f'run: ... --module MODULE --config CONFIG "${{{VARIABLE}[@]}}", with a config of this model']
    if plan.chunked_loss:
        notes.append("loss: measured in chunks, so keep ChunkedLossWrapper in the config, as torchtitan's own have it")
    return shell_export(plan, VARIABLE, flags, notes)
