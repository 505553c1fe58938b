"""What a candidate needs beyond what was measured, if a trainer keeps other number formats or computes full logits."""

from __future__ import annotations

from bexp.explorer.cost_model.step import static_parts
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.search.trainer_terms import compute_dtype, precision_of
from bexp.explorer.spec.candidate import Candidate
from bexp.explorer.spec.model import DType
from bexp.explorer.spec.parts import ModelParts
from bexp.explorer.spec.request import ExplorationRequest
from bexp.explorer.spec.trainer import Trainer
from bexp.explorer.spec.training import Precision


def unmeasured_bytes(
    trainer: Trainer, request: ExplorationRequest, report: DeviceReport | None, candidate: Candidate
) -> int:
    """Return the bytes of one device that `trainer` needs for the number formats that it keeps; 0 if it needs fewer."""
    told, measured = precision_of(trainer, request, report, candidate), request.training.precision
    model = None if report is None else report.parts
    if told == measured or model is None:
        return 0
    at_level = request.sharded(candidate.sharding)
    return max(0, _state_bytes(model, at_level, told) - _state_bytes(model, at_level, measured))


def full_logits_bytes(request: ExplorationRequest, report: DeviceReport | None, candidate: Candidate) -> int:
    """Return the bytes of the logits of a micro-batch, which a loss in chunks never holds.

    They exist in the format of the products, as a float32 copy, and as the gradient of that copy.
    """
    if request.explored.vocab_size is None:
        return 0
    tokens = candidate.micro_batch_size * request.seq_length // candidate.context_parallel_size
    each = compute_dtype(request, report).itemsize + 2 * DType.FLOAT32.itemsize
    return tokens * request.explored.vocab_size * each


def _state_bytes(model: ModelParts, request: ExplorationRequest, precision: Precision) -> int:
    """Return the training state of one device with `precision`; `model` has the bytes of the measured one."""
    float32, item = DType.FLOAT32.itemsize, model.dtype.itemsize
    size, measured = (float32 if p == "autocast" else item for p in (precision, request.training.precision))
    number, trained = model.parameter_bytes // measured, model.trainable_bytes // measured
    if request.training.precision == "upcast":  # it trains all parameters
        number = trained = model.num_parameters
    wide = model.shell.num_parameters * (float32 - item) if precision == "upcast" else 0  # norms of layers are small
    sizes = {"parameter_bytes": number * size + wide, "trainable_bytes": trained * size + wide}
    training = request.training.model_copy(update={"precision": "pure"})
    state = static_parts(model.model_copy(update=sizes), request.model_copy(update={"training": training})).total
    if precision != "master":
        return state
    beside = trained * (float32 + training.optimizer.num_states * (float32 - item))
    return state + -(-beside // (request.num_devices if training.sharding.level else 1))
