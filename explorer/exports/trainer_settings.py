"""What is exported: the execution of a training run, in terms that every trainer has a name for.

Nothing that changes what is learnt is part of it: no learning rate, no schedule, no seed. The global batch is the one
that the request states; if it states none, accumulation is left to the trainer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.loss import LOSSES
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.exports.exploration import ExportError, ExportSource
from bexp.explorer.exports.header import header_lines, nearest_policy, recomputed_indices, seq_length_of
from bexp.explorer.model.lengths import Batching
from bexp.explorer.model.model import DType
from bexp.explorer.model.quantization import Quantization
from bexp.explorer.model.training import LoRASpec, Sharding
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.plan import MeshPlan
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.trainer_terms import (
    attention_name,
    compute_dtype,
    experts_name,
    is_compiled,
    is_own_code,
    loss_of,
    precision_of,
    sharding_of,
)
from bexp.explorer.trainers.trainer import TRAINERS, Trainer, TrainerName

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """The execution of a training run.

    `batch_size` counts the sequences of a step over all devices; it and `grad_accum_steps` are None if the request
    states no batch. `precision` is `pure` (weights in `dtype`), `autocast` (float32 weights), or `master` (weights in
    `dtype` with float32 master weights). `recompute` is `none`, `full`, or a policy that the trainer has.
    `recomputed_layers` are the indices of those recomputed as a whole. `attention` and `experts` have the names of the
    transformers library; None is the trainer's own choice. `tokens_per_sequence` is the mean of texts of unequal
    length, None if they were measured full. `header` says, line by line, where it comes from, what was lost and what
    else must be set.
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
    recomputed_layers: tuple[int, ...]
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
        recompute = nearest_policy(trainer, recompute, request, report)
    return TrainerSettings(
        model_name=request.explored.name,
        has_experts=candidate.expert_backend is not None,
        seq_length=seq_length_of(request, report),
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
        recomputed_layers=recomputed_indices(request, report, recompute),
        attention=None if "attention" in missing else attention_name(candidate, report),
        experts=None if "experts" in missing else experts_name(candidate),
        chunked_loss=not LOSSES[trainer.nearest_loss(loss_of(candidate, request))].holds_logits,
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
        header=tuple(header_lines(name, format_name, exploration, request, known, choice)),
    )
