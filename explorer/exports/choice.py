"""The candidate to export: the answer's own, or the best that another trainer can express, and its memory there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bexp.explorer.cost.parameters import count_parameters
from bexp.explorer.cost.step import FRAGMENTATION, static_parts
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.place import EmptySpaceError
from bexp.explorer.exports.exploration import ExportSource
from bexp.explorer.model.model import DType
from bexp.explorer.model.parts import ExploredModel, ModelParts
from bexp.explorer.model.training import Precision
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.plan import Plan
from bexp.explorer.records.recommendation import Recommendation
from bexp.explorer.request.request import ExplorationRequest, place_of
from bexp.explorer.search.alternatives import accumulate, best_among, dividing_rows, expected_tokens_per_second
from bexp.explorer.search.confidence import confidence_score
from bexp.explorer.search.history import TrialHistory
from bexp.explorer.search.legal_space import explored_models
from bexp.explorer.search.posterior import Posterior
from bexp.explorer.search.restored import restore_knowledge, restore_space
from bexp.explorer.search.trainer_terms import (
    answer_refusal,
    compute_dtype,
    find_missing,
    lost_formats,
    measured_precision,
    needs_logits,
    precision_of,
)
from bexp.explorer.trainers.document import ExportError
from bexp.explorer.trainers.registry import TRAINERS
from bexp.explorer.trainers.trainer import Trainer

REPLACEABLE = frozenset({"recompute", "sharding", "attention", "loss"})
"""Terms that a trainer may replace if it cannot express them and nothing else was explored: the memory stays known.

More layers are recomputed, more is sharded, torch chooses its attention kernel, and full logits are counted.
"""


@dataclass(frozen=True, slots=True)
class Choice:
    """A candidate to export."""

    candidate: Candidate
    grad_accum_steps: int | None
    """None if no batch is stated."""
    tokens_per_second: float
    missing: dict[str, str]
    """The terms, with words, that the trainer cannot express and replaces."""
    is_own: bool
    """Whether the answer names this candidate for the batch."""
    confidence: int
    """In the answer; of another candidate, in it as the best that the trainer can express."""
    loss: float = 0.0
    """The share of tokens/s by which it is slower than the answer; negative if it is faster."""
    plan: Plan | None = None
    """How devices share the model."""


def choose(trainer: Trainer, exploration: ExportSource, request: ExplorationRequest, known: Recommendation) -> Choice:
    """Return the candidate that the answer names for the batch, or the best that `trainer` can express.

    Raises ExportError if no candidate divides a stated batch, or if the trainer can express none that fits.
    """
    if (lacking := answer_refusal(trainer, known, request)) is not None:
        able = [
            name for name, other in TRAINERS.items() if other.formats and answer_refusal(other, known, request) is None
        ]
        hint = f"; these can: {', '.join(able)}" if able else ""
        raise ExportError(f"{trainer.title} cannot express {lacking}{hint}")
    if known.plan is not None:
        return _choose_shared(trainer, request, exploration.report, known, known.plan)
    best, report = known.for_batch, exploration.report
    steps, _ = accumulate(request, best.candidate)
    if request.batch_size is not None and steps is None:
        nearest = " or ".join(map(str, known.dividing_batch_sizes))
        hint = f"; the nearest that can be is {nearest}" if nearest else ""
        raise ExportError(f"The batch_size {request.batch_size} is divided by no candidate that fits{hint}.")
    missing = find_missing(trainer, best.candidate, request, report)
    rate, confidence = best.expected_tokens_per_second, best.confidence or 0
    own = Choice(best.candidate, steps, rate, missing, is_own=True, confidence=confidence)
    extra = _unmeasured_bytes(trainer, request, report, best.candidate, best.measured_peak_bytes)
    fits = extra == 0 or best.required_bytes + extra <= known.memory_limit_bytes
    if fits and not missing:
        return own
    restored = None if report is None else _restore(request, report, exploration)
    if restored is None or report is None:
        if fits and missing.keys() <= REPLACEABLE:
            return own
    elif (choice := _best_expressible(trainer, report, restored, own, known)) is not None:
        return choice
    lost = f"cannot express {' or '.join(missing.values())}" if missing else "needs more memory for what is recommended"
    raise ExportError(
        f"{trainer.title} {lost}, and no explored candidate that it can express fits. An exploration for this trainer "
        "finds one: see `--trainer`."
    )


def _choose_shared(
    trainer: Trainer, request: ExplorationRequest, report: DeviceReport | None, known: Recommendation, plan: Plan
) -> Choice:
    """Return the recommended candidate of devices that share the model, or what stands for it."""
    other = plan.replacement()
    plan, candidate, rate = other or (plan, known.candidate, known.tokens_per_second)
    loss = 1.0 - rate / known.tokens_per_second
    missing = find_missing(trainer, candidate, request, report)
    steps, is_own = plan.num_micro_batches, other is None
    return Choice(candidate, steps, rate, missing, is_own=is_own, confidence=known.confidence, loss=loss, plan=plan)


def _restore(request: ExplorationRequest, report: DeviceReport, exploration: ExportSource) -> Posterior | None:
    """Return the posterior of the main variant's candidates, given the stored trials.

    None if nothing was measured, or if another version of this program stored trials without candidates of this one.
    """
    models = explored_models(request, report)
    if not exploration.trials or not models:
        return None
    history = TrialHistory(exploration.trials, request.budget, len(models))
    try:
        space = restore_space(models[0], request, report, history.trials_of(models[0].variant))
    except EmptySpaceError:
        return None
    if space.table is None:
        return None
    return restore_knowledge(space, request, report, history).posterior


def _best_expressible(
    trainer: Trainer, report: DeviceReport, posterior: Posterior, own: Choice, known: Recommendation
) -> Choice | None:
    """Return the best candidate by posterior mean that divides the batch, fits, and can be expressed; None without one.

    A term that the trainer can express of no candidate is no choice: the trainer replaces it if possible. If the
    answer's `own` candidate is among the rest, it stays the best.
    """
    request, table = posterior.request, posterior.table
    rows = posterior.open_rows()
    if request.batch_size is not None:
        rows = rows[dividing_rows(table)[rows]]
    place = place_of(request, report=report)
    missing = {int(row): find_missing(trainer, table.candidates[row], request, report, place) for row in rows}
    replaced = REPLACEABLE.intersection(*missing.values())
    rows = np.array([row for row, one in missing.items() if one.keys() <= replaced], dtype=np.int64)
    extra_A = [
        _unmeasured_bytes(trainer, request, report, table.candidates[row], posterior.bytes(row).peak) for row in rows
    ]
    needed_A = posterior.memory.required_C[rows] + np.array(extra_A)
    rows, own_row = rows[needed_A <= posterior.limit_bytes], table.row.get(own.candidate)
    if own_row is not None and own_row in rows:
        return own
    best = best_among(posterior, rows)
    if best is None:
        return None
    candidate = table.candidates[best.row]
    named = [row for row in (own_row, table.row.get(known.candidate)) if row is not None]
    ran = [row for row in named if posterior.knowledge.whole_models.was_run(row)]
    reached = expected_tokens_per_second(posterior, best.row, next(iter([*ran, *named]), best.row))
    return Choice(
        candidate=candidate,
        grad_accum_steps=accumulate(request, candidate)[0],
        tokens_per_second=reached,
        missing=missing[best.row],
        is_own=False,
        confidence=confidence_score(best.confidence),
        loss=1.0 - reached / own.tokens_per_second,
    )


def _unmeasured_bytes(
    trainer: Trainer,
    request: ExplorationRequest,
    report: DeviceReport | None,
    candidate: Candidate,
    peak_bytes: int,
) -> int:
    """Return the bytes of a candidate that were not measured: full logits, and this trainer's number formats."""
    logits = full_logits_bytes(request, report, candidate) if needs_logits(trainer, candidate, request) else 0
    allocated = logits + unmeasured_bytes(trainer, request, report, candidate, peak_bytes)
    return round((1 + FRAGMENTATION[request.allocator]) * allocated)


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
