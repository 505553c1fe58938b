"""What a candidate needs beyond what was measured, if a trainer keeps other number formats or computes full logits."""

from __future__ import annotations

from bexp.explorer.cost_model.parameters import count_parameters
from bexp.explorer.cost_model.step import static_parts
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.search.trainer_terms import compute_dtype, measured_precision, precision_of
from bexp.explorer.spec.candidate import Candidate
from bexp.explorer.spec.model import DType
from bexp.explorer.spec.parts import ExploredModel, ModelParts
from bexp.explorer.spec.request import ExplorationRequest
from bexp.explorer.spec.trainer import Trainer
from bexp.explorer.spec.training import Precision


def unmeasured_bytes(
    trainer: Trainer, request: ExplorationRequest, report: DeviceReport | None, candidate: Candidate, peak_bytes: int
) -> int:
    """Return the bytes of one device that `trainer` needs for the number formats that it keeps; 0 if it needs fewer.

    `peak_bytes` is the candidate's peak in the measured formats. With master weights the optimizer holds all gradients
    in float32 while it steps, when the activations are gone.
    """
    told, measured = precision_of(trainer, request, report), measured_precision(request, report)
    model = request.model if report is None or report.parts is None else report.parts
    if told == measured or model is None:
        return 0
    at_level = request.sharded(candidate.sharding)
    state, transient = _state_bytes(model, at_level, measured, told)
    activations = peak_bytes - _state_bytes(model, at_level, measured, measured)[0]
    return max(0, state + max(activations, transient) - peak_bytes)


def full_logits_bytes(request: ExplorationRequest, report: DeviceReport | None, candidate: Candidate) -> int:
    """Return the bytes of the logits of a micro-batch, which a loss in chunks never holds.

    They exist in the format of the products, as a float32 copy, and as the gradient of that copy.
    """
    if request.explored.vocab_size is None:
        return 0
    tokens = candidate.micro_batch_size * request.seq_length // candidate.context_parallel_size
    each = compute_dtype(request, report).itemsize + 2 * DType.FLOAT32.itemsize
    return tokens * request.explored.vocab_size * each


def _state_bytes(
    model: ExploredModel, request: ExplorationRequest, measured: Precision, precision: Precision
) -> tuple[int, int]:
    """Return the training state of one device with `precision`, and what its optimizer holds besides while it steps.

    `model` has the formats of the `measured` precision.
    """
    float32 = DType.FLOAT32
    if isinstance(model, ModelParts):
        was, size = (float32.itemsize if p == "autocast" else model.dtype.itemsize for p in (measured, precision))
        trained = model.trainable_bytes // was
        sizes = {"parameter_bytes": model.parameter_bytes // was * size, "trainable_bytes": trained * size}
        training = request.training.model_copy(update={"precision": precision})
        kept: ExploredModel = model.model_copy(update=sizes)
    else:
        trained = count_parameters(model)
        master = float32 if precision == "master" else None
        optimizer = request.training.optimizer.model_copy(update={"master_dtype": master})
        training = request.training.model_copy(update={"optimizer": optimizer})
        kept = model.model_copy(update={"dtype": float32}) if precision == "autocast" else model
    state = static_parts(kept, request.model_copy(update={"training": training})).total
    shards = request.devices.optimizer_shards
    return state, -(-trained * float32.itemsize // shards) if precision == "master" else 0
