"""Flags of Megatron-Core's training script, as an array for a shell. Names as of Megatron-Core 0.19."""

from __future__ import annotations

from bexp.explorer.dimensions.attention import TORCH_CHOICE
from bexp.explorer.dimensions.parallelism import Parallelism
from bexp.explorer.dimensions.recompute import DIFFERENT_LAYERS, FIRST_LAYERS, LAYER_GROUPS, SHARES, Recompute
from bexp.explorer.model.model import DType
from bexp.explorer.model.training import Sharding
from bexp.explorer.trainers.document import (
    HALF_NAMES,
    ExportDocument,
    TrainerSettings,
    other_optimizer_notes,
    shell_export,
)
from bexp.explorer.trainers.trainer import CAPACITY, MODEL_PARALLELISM, Trainer, expresses

ATTENTION = {"flash": "flash", "cudnn": "fused", "math": "unfused", TORCH_CHOICE: "auto"}
"""Megatron's name of the nearest kernel; its flash attention is that of the flash-attn package."""
_STATE = {Sharding.ZERO2: "optim_grads", Sharding.ZERO3: "optim_grads_params"}
VARIABLE = "MEGATRON_FLAGS"


def render(settings: TrainerSettings) -> ExportDocument:
    """Return the flags."""
    flags: list[tuple[str, ...]] = [
        ("--micro-batch-size", str(settings.micro_batch_size)),
        *([] if settings.batch_size is None else [("--global-batch-size", str(settings.batch_size))]),
        *([("--seq-length", str(settings.seq_length))] if settings.states_length else []),
        *_parallelism_flags(settings),
        ("--context-parallel-size", str(settings.context_parallel_size)),
        ("--attention-backend", ATTENTION[settings.attention or TORCH_CHOICE]),
        *_recompute_flags(settings),
        *_sharding_flags(settings),
    ]
    if settings.context_parallel_size > 1:
        flags.append(("--cp-comm-type", "p2p"))
    if settings.varies_query_groups:
        flags += [("--group-query-attention",), ("--num-query-groups", str(settings.candidate.num_query_groups))]
    if settings.has_experts:
        flags.append(("--moe-grouped-gemm",))
    if (factor := settings.candidate.capacity_factor) is not None:  # only dispatchers of this type drop tokens
        flags += [("--moe-expert-capacity-factor", f"{factor:.15g}"), ("--moe-token-drop-policy", "probs")]
        flags.append(("--moe-token-dispatcher-type", "alltoall"))
    if settings.dtype in HALF_NAMES:
        flags.append((f"--{HALF_NAMES[settings.dtype]}",))
    notes = [f'run: torchrun ... pretrain_gpt.py "${{{VARIABLE}[@]}}" ...', *other_optimizer_notes(settings)]
    notes += _memory_notes(settings)
    return shell_export(settings, VARIABLE, flags, notes)


def _parallelism_flags(settings: TrainerSettings) -> list[tuple[str, ...]]:
    """Return how devices share the model. The layout lists the stages, by the balance of layers that was chosen."""
    sizes = settings.parallelism or Parallelism()
    flags: list[tuple[str, ...]] = [
        ("--tensor-model-parallel-size", str(sizes.tensor)),
        ("--pipeline-model-parallel-size", str(sizes.pipeline)),
    ]
    if sizes.tensor > 1:
        flags.append(("--sequence-parallel",))
    if sizes.pipeline > 1:
        stages = "|".join(f"t*{count}" for count in settings.layers_per_stage)
        flags.append(("--pipeline-model-parallel-layout", f"E{stages}L"))
    if sizes.expert > 1:
        flags += [("--expert-model-parallel-size", str(sizes.expert)), ("--expert-tensor-parallel-size", "1")]
    return flags


def _recompute_flags(settings: TrainerSettings) -> list[tuple[str, ...]]:
    """Return the flags of a policy. `block` recomputes the first layers of each pipeline stage, `uniform` chunks."""
    if settings.recompute is Recompute.NONE:
        return []
    if settings.recompute is Recompute.SELECTIVE:
        return [("--recompute-granularity", "selective"), ("--recompute-modules", "core_attn")]
    chunk = 1 if settings.recompute is Recompute.FULL else settings.recompute.group_size
    stages = 1 if settings.parallelism is None else settings.parallelism.num_stages
    return [
        ("--recompute-granularity", "full"),
        ("--recompute-method", "block" if chunk is None else "uniform"),
        ("--recompute-num-layers", str(chunk or -(-len(settings.recomputed_layers) // stages))),
    ]


def _sharding_flags(settings: TrainerSettings) -> list[tuple[str, ...]]:
    """Return the flags of data parallelism. By default Megatron exchanges everything when nothing else runs."""
    if settings.data_parallel_size * settings.context_parallel_size == 1:
        return []
    flags: list[tuple[str, ...]] = [("--overlap-grad-reduce",)]
    if settings.sharding is not Sharding.NONE:
        flags += [("--use-distributed-optimizer",), ("--overlap-param-gather",)]
    if settings.sharding in _STATE:
        flags += [
            ("--use-megatron-fsdp",),
            ("--data-parallel-sharding-strategy", _STATE[settings.sharding]),
            ("--ckpt-format", "fsdp_dtensor"),
        ]
    return flags


def _memory_notes(settings: TrainerSettings) -> list[str]:
    """Return a note that gradients need more than was measured: in bfloat16, Megatron accumulates them in float32."""
    optimizer = settings.training.optimizer
    measured = DType.FLOAT32 if settings.precision == "autocast" else optimizer.gradient_dtype(settings.dtype)
    if settings.dtype is not DType.BFLOAT16 or measured is DType.FLOAT32:
        return []
    return [
        f"memory: Megatron keeps gradients in float32, and they were measured in {measured}; --grad-reduce-in-bf16 "
        "keeps them in bfloat16, which changes the sums"
    ]


MEGATRON = Trainer(
    name="megatron",
    title="Megatron-Core",
    formats={"megatron": render},
    expresses=expresses(
        attention=ATTENTION,
        recompute={
            *(Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL, *SHARES),
            *(FIRST_LAYERS, LAYER_GROUPS, DIFFERENT_LAYERS),
        },
        sharding=Sharding,
        context_parallel={"zigzag"},
        parallelism={MODEL_PARALLELISM},
        capacity_factor={CAPACITY},
        adapters=(),
        batching=(),
    ),
    precisions=("master",),
    float32_gradients=True,
)
