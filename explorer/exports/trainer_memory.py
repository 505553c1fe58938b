"""The memory of a candidate beyond the measurement, if a trainer keeps other number formats or computes full logits."""

from __future__ import annotations

from bexp.explorer.cost.parameters import count_parameters
from bexp.explorer.cost.step import static_parts
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.model import DType
from bexp.explorer.model.parts import ExploredModel, ModelParts
from bexp.explorer.model.training import Precision
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.trainer_terms import compute_dtype, lost_formats, measured_precision, precision_of
from bexp.explorer.trainers.trainer import Trainer


def unmeasured_bytes(
    trainer: Trainer, request: ExplorationRequest, report: DeviceReport | None, candidate: Candidate, peak_bytes: int
) -> int:
    """Return the bytes of one device that `trainer` needs for the number formats that it keeps; 0 if it needs fewer.

    `peak_bytes` is the candidate's peak in the measured formats. With master weights the optimizer holds all gradients
    in float32 while it steps, when the activations are gone.
    """
    kept, measured = precision_of(trainer, request, report, candidate), measured_precision(request, report)
    model = request.model if report is None or report.parts is None else report.parts
    is_as_measured = kept == measured and not lost_formats(trainer, request, report, candidate)
    if is_as_measured or model is None:
        return 0
    at_level = request.sharded(candidate.sharding)
    state, transient = _state_bytes(model, _with_kept_formats(trainer, at_level), measured, kept)
    activations = peak_bytes - _state_bytes(model, at_level, measured, measured)[0]
    if kept == measured:
        transient = 0  # the measured step had as much
    return max(0, state + max(activations, transient) - peak_bytes)


def _with_kept_formats(trainer: Trainer, request: ExplorationRequest) -> ExplorationRequest:
    """Return the request with gradients and moments in the formats that a trainer keeps by itself."""
    optimizer = request.training.optimizer
    kept = {"state_dtype": None, "grad_dtype": optimizer.grad_dtype if trainer.float32_gradients else None}
    training = request.training.model_copy(update={"optimizer": optimizer.model_copy(update=kept)})
    return request.model_copy(update={"training": training})


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
    """Return the training state of one device with `precision`, and the additional bytes of its optimizer's step.

    `model` has the formats of the `measured` precision. Upcast norms of layers are left out, because they are small.
    Float32 weights of shapes count as half-precision ones with master weights: sharded ones are gathered in half
    precision.
    """
    training, float32 = request.training, DType.FLOAT32
    kept: ExploredModel = model
    if isinstance(model, ModelParts):
        trained, kept = _as_kept(model, measured, precision)
        training = training.model_copy(update={"precision": precision})
    else:
        trained = count_parameters(model)
        master = None if precision == "pure" else float32
        optimizer = training.optimizer.model_copy(update={"master_dtype": master})
        training = training.model_copy(update={"optimizer": optimizer})
    state = static_parts(kept, request.model_copy(update={"training": training})).total
    shards = request.devices.optimizer_shards
    return state, -(-trained * float32.itemsize // shards) if precision == "master" else 0


def _as_kept(model: ModelParts, measured: Precision, precision: Precision) -> tuple[int, ModelParts]:
    """Return the number of trained parameters, and the model with the bytes that it has with `precision`."""
    item, float32 = model.dtype.itemsize, DType.FLOAT32.itemsize
    was, size = (float32 if each == "autocast" else item for each in (measured, precision))
    number, trained = model.parameter_bytes // was, model.trainable_bytes // was
    if measured == "upcast":  # it trains all parameters
        number = trained = model.num_parameters
    if measured == precision:
        return trained, model
    wide = model.shell.num_parameters * (float32 - item) if precision == "upcast" else 0
    sizes = {"parameter_bytes": number * size + wide, "trainable_bytes": trained * size + wide}
    return trained, model.model_copy(update=sizes)
