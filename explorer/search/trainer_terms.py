"""A candidate in the terms of a trainer, and what of it the trainer cannot be told."""

from __future__ import annotations

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.kernels import Kernels
from bexp.explorer.dimensions.loss import LOSS, LOSSES, Loss
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.model import DType, LayerKind
from bexp.explorer.model.target import BEXP, TRANSFORMERS
from bexp.explorer.model.training import Precision, Sharding
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.trainers.trainer import TORCH_CHOICE, TORCH_KERNELS, Trainer, library_experts


def attention_name(candidate: Candidate, report: DeviceReport | None) -> str | None:
    """Return the attention implementation by the transformers library's names; None for whatever the code calls.

    A kernel of torch's is `sdpa` if torch chooses it by itself on the device, else `flash`, `cudnn`, `efficient` or
    `math`: it was pinned.
    """
    name = candidate.attention_backend
    if candidate.is_whole:
        return None
    if report is not None and name == report.default_attention and name in TORCH_KERNELS:
        return TORCH_CHOICE
    return name.removeprefix(f"{TORCH_CHOICE}:")


def experts_name(candidate: Candidate) -> str | None:
    """Return the experts implementation by the transformers library's names; ours keep their own."""
    name = candidate.expert_backend
    return None if name is None else library_experts(name)


def loss_of(candidate: Candidate, request: ExplorationRequest) -> Loss:
    """Return how the loss of a candidate was computed."""
    if candidate.loss is None and request.model is not None and request.training.loss.kind == "chunked":
        return "chunked"
    return candidate.loss or LOSS.plain


def needs_logits(trainer: Trainer, candidate: Candidate, request: ExplorationRequest) -> bool:
    """Whether a trainer holds the logits of all tokens where a candidate was measured without."""
    loss = loss_of(candidate, request)
    return LOSSES[trainer.nearest_loss(loss)].holds_logits and not LOSSES[loss].holds_logits


def is_compiled(candidate: Candidate, request: ExplorationRequest) -> bool:
    """Whether a candidate's layers were compiled."""
    return request.execution_of(candidate).compiles


def is_replayed(candidate: Candidate, request: ExplorationRequest) -> bool:
    """Whether a candidate's micro-steps were replayed as CUDA graphs."""
    return request.execution_of(candidate).replays


def sharding_of(candidate: Candidate, request: ExplorationRequest) -> Sharding:
    """Return the level of sharding that a candidate was measured with."""
    return candidate.sharding or request.training.sharding


def compute_dtype(request: ExplorationRequest, report: DeviceReport | None) -> DType:
    """Return the number format of the matrix products."""
    parts = None if report is None else report.parts
    return request.explored.dtype or (DType.BFLOAT16 if parts is None else parts.dtype)


def is_own_code(request: ExplorationRequest) -> bool:
    """Whether the target is one that a person has written."""
    return request.target_name not in (BEXP, TRANSFORMERS)


def measured_precision(request: ExplorationRequest, report: DeviceReport | None) -> Precision:
    """Return the precision that was measured; the reference layers have master weights unless the request has none."""
    if request.target_name == BEXP:
        return "master" if request.training.optimizer.has_master(compute_dtype(request, report)) else "pure"
    return request.training.precision


def precision_of(
    trainer: Trainer, request: ExplorationRequest, report: DeviceReport | None, candidate: Candidate
) -> Precision:
    """Return the precision that a trainer is told: the measured one if it has that, else the nearest that it has.

    Adapters, weights in float32 and a person's own code stay as they were measured. A trainer that casts parts of a
    model to float32 decides that by the candidate's attention and sharding.
    """
    measured = measured_precision(request, report)
    is_float32 = compute_dtype(request, report) is DType.FLOAT32
    if request.training.lora is not None or is_own_code(request) or is_float32:
        return measured
    if trainer.upcast_attention and request.target_name == BEXP:
        return "pure"  # the reference layers cast nothing
    if trainer.upcast_attention:
        is_whole = sharding_of(candidate, request) is Sharding.NONE
        name = attention_name(candidate, report) or TORCH_CHOICE
        is_upcast = is_whole and (name in TORCH_KERNELS or name in trainer.upcast_attention)
        return "upcast" if is_upcast else "pure"
    if measured in trainer.precisions:
        return measured
    return "autocast" if measured == "master" and "autocast" in trainer.precisions else trainer.precisions[0]


def layers_differ(request: ExplorationRequest, report: DeviceReport | None) -> bool:
    """Whether the layers are of more than one kind, so that it matters which of them are recomputed."""
    if request.model is not None:
        return 0 < request.model.count_layers(LayerKind.MOE) < request.model.num_layers
    return report is not None and report.parts is not None and len(set(report.parts.layers)) > 1


def halves_experts(trainer: Trainer, report: DeviceReport | None) -> bool:
    """Whether experts stayed plain beside quantised weights, in float32, and a trainer keeps them in half precision."""
    weights = () if report is None or report.parts is None else report.parts.weights
    return trainer.halves_experts and any(one.kind == "experts" and not one.quantized_bytes for one in weights)


def lost_formats(
    trainer: Trainer, request: ExplorationRequest, report: DeviceReport | None, candidate: Candidate
) -> list[str]:
    """Return the number formats of gradients and moments that the request states and a trainer keeps otherwise."""
    if request.target_name != BEXP:
        return []
    optimizer, told = request.training.optimizer, precision_of(trainer, request, report, candidate)
    gradients, states = trainer.kept_formats(compute_dtype(request, report), told)
    stated = (("gradients", optimizer.grad_dtype, gradients), ("optimizer states", optimizer.state_dtype, states))
    return [f"{what} in {asked}" for what, asked, kept in stated if asked not in (None, kept)]


def keeps_other_formats(
    trainer: Trainer, request: ExplorationRequest, report: DeviceReport | None, candidate: Candidate
) -> bool:
    """Whether a trainer keeps other number formats than were measured, so that its speed is not known."""
    halves = trainer.halves_adapters or trainer.halves_shell or halves_experts(trainer, report)
    if request.quantized is not None and halves:
        return True
    return precision_of(trainer, request, report, candidate) != measured_precision(request, report)


def find_missing(
    trainer: Trainer, candidate: Candidate, request: ExplorationRequest, report: DeviceReport | None
) -> dict[str, str]:
    """Return the dimensions of `candidate` that `trainer` cannot be told, each in words."""
    attention, experts = attention_name(candidate, report), experts_name(candidate)
    sharding, layout = sharding_of(candidate, request), candidate.context_parallel_layout
    on_host, policy = candidate.recompute is Recompute.OFFLOAD, candidate.recompute
    has_policy = trainer.has_policy(policy, layers_differ=layers_differ(request, report))
    differ = trainer.has_policy(policy) and not has_policy
    is_default = report is not None and candidate.expert_backend == report.default_experts
    missing = {
        "bta_tile": candidate.bta_tile is not None and not trainer.tiles,
        "recompute": not (has_policy or on_host),
        "offload": not has_policy and on_host,  # nothing else is known to need as little
        "attention": attention is not None and attention not in trainer.attention,
        "experts": experts is not None and not is_default and experts not in trainer.experts,
        "loss": loss_of(candidate, request) not in trainer.losses,
        "execution": is_compiled(candidate, request) and not trainer.compiled_layers,
        "graph": is_replayed(candidate, request) and not trainer.graphs,
        "kernels": candidate.kernels is Kernels.LIGER and not trainer.liger,
        "sharding": sharding not in trainer.sharding,
        "adapters": trainer.lacks_sharded_adapters(request.training.lora, sharding),
        "context_parallel": layout is not None and layout not in trainer.layouts,
        "precision": _is_other_precision(trainer, request, report, candidate),
        "rows": has_other_rows(trainer, request, attention, candidate.micro_batch_size),
        "optimizer": not trainer.has_optimizer(request.training.optimizer.of_library),
    }
    if not any(missing.values()):
        return {}
    words = {
        "bta_tile": f"attention tiles of {candidate.bta_tile} sequences",
        "recompute": f"the recomputation policy '{policy}'{' of layers that differ' if differ else ''}",
        "offload": "activations in the host's memory (recomputation 'offload')",
        "attention": f"the attention kernel '{attention}'",
        "experts": f"the expert kernels '{experts}'",
        "loss": LOSS.words(loss_of(candidate, request)),
        "execution": "compiled layers",
        "graph": "micro-steps as CUDA graphs",
        "kernels": "the kernels of liger",
        "sharding": f"the sharding level '{sharding}'",
        "adapters": f"LoRA with the sharding level '{sharding}'",
        "context_parallel": f"{candidate.context_parallel_size} devices that share each sequence in layout '{layout}'",
        "optimizer": f"the optimizer '{request.training.optimizer.name}'",
        "rows": f"packed rows as attention '{attention}' was measured with them, at micro-batch "
        f"{candidate.micro_batch_size}",
        "precision": f"precision '{request.training.precision}' with attention '{attention}' and sharding '{sharding}'",
    }
    return {name: words[name] for name, is_missing in missing.items() if is_missing}


def has_other_rows(trainer: Trainer, request: ExplorationRequest, attention: str | None, size: int) -> bool:
    """Whether the trainer packs a micro-batch of `size` otherwise than was measured, or not at all.

    It makes one row where several were measured, or the reverse; or its attention takes no micro-batch so large.
    """
    if request.batching != "packed":
        return False
    if attention is not None and size > trainer.largest_packed.get(attention, size):
        return True
    if (attention or "").startswith("flash_attention"):
        return False
    return trainer.flattens is not request.flattens


def _is_other_precision(
    trainer: Trainer, request: ExplorationRequest, report: DeviceReport | None, candidate: Candidate
) -> bool:
    """Whether the trainer that was asked for keeps a candidate's weights in other formats than those measured."""
    if not trainer.upcast_attention or request.runner is not trainer or request.target_name != TRANSFORMERS:
        return False
    return precision_of(trainer, request, report, candidate) != request.training.precision
