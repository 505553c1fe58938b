"""Comparisons: of whole models with what composes them, and of a recommendation with a row for each role."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from bexp.explorer.cost.composition import Composition, Ints, Mask
from bexp.explorer.cost.step import StepSeconds, combine_seconds
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.micro_batch_size import MICRO_BATCH_SIZE
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import Outcome, WholeModelMeasurement
from bexp.explorer.records.recommendation import WITHIN, Alternative, Role, WholeModelCheck, beside_whole
from bexp.explorer.records.trial import Trial
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.confidence import confidence_score
from bexp.explorer.search.posterior import BestCandidate, Posterior, smallest_position


def compare_whole_run(posterior: Posterior, row: int, trial: Trial | None) -> WholeModelCheck | None:
    """Return how far the composed step is from that of one run of a whole model; None if it did not run."""
    if trial is None or trial.measurement.outcome is not Outcome.OK or trial.measurement.whole_model is None:
        return None
    whole = _in_an_epoch(posterior, row, trial.measurement.whole_model)
    step = _whole_step(posterior, posterior.table.candidates[row], whole)
    return _compare(posterior, row, whole, step.tokens_per_second, step.step)


def check_whole_model(posterior: Posterior, row: int, trial: Trial | None) -> WholeModelCheck | None:
    """Return `compare_whole_run` of a candidate for an answer, with the tokens/s of all runs of its whole model.

    An answer compares candidates by these. `measurement` is that of the trial, one of the runs, with its seconds scaled
    to those of all, so that they add up to `step_seconds`.
    """
    check, reached = compare_whole_run(posterior, row, trial), posterior.knowledge.whole_models.tokens_per_second(row)
    if check is None or reached is None:
        return check
    factor, whole = check.tokens_per_second / reached, check.measurement
    scaled = {
        "micro_step_seconds": factor * whole.micro_step_seconds,
        "optimizer_seconds": factor * whole.optimizer_seconds,
        "standard_error_seconds": factor * whole.standard_error_seconds,
    }
    if whole.communication_seconds is not None:
        scaled["communication_seconds"] = factor * whole.communication_seconds
    return _compare(posterior, row, whole.model_copy(update=scaled), reached, factor * check.step_seconds)


def _compare(
    posterior: Posterior, row: int, whole: WholeModelMeasurement, tokens_per_second: float, step_seconds: float
) -> WholeModelCheck:
    return WholeModelCheck(
        measurement=whole,
        tokens_per_second=tokens_per_second,
        step_seconds=step_seconds,
        step_error=(posterior.seconds(row).step - step_seconds) / step_seconds,
        peak_error=(posterior.bytes(row).peak - whole.peak_bytes) / whole.peak_bytes,
    )


def whole_model_tokens_per_second(posterior: Posterior, candidate: Candidate, whole: WholeModelMeasurement) -> float:
    """Return the tokens/s of a whole-model run, in an epoch."""
    whole = _in_an_epoch(posterior, posterior.table.row[candidate], whole)
    return _whole_step(posterior, candidate, whole).tokens_per_second


def expected_tokens_per_second(posterior: Posterior, row: int, other: int) -> float:
    """Return the tokens/s of a candidate's whole model, else its composed figure, scaled as that of `other` is.

    So no composed figure is above that of the `other` whole model, which it is compared with.
    """
    whole = posterior.knowledge.whole_models.tokens_per_second(row)
    if whole is not None:
        return whole
    composed, of_other = (posterior.corrected_seconds(each).tokens_per_second for each in (row, other))
    reached = posterior.knowledge.whole_models.tokens_per_second(other)
    return beside_whole(composed if reached is None else composed * reached / of_other, reached)


def performance(posterior: Posterior, row: int, base: int) -> float:
    """Return the throughput relative to the base: of both whole models, or else of both as composed and corrected.

    A base may be outside the space. It is then no alternative, so it counts in full, and the cost of the space shows.
    """
    reached, of_base = (posterior.knowledge.whole_models.tokens_per_second(each) for each in (row, base))
    if reached is None or of_base is None:
        reached, of_base = (posterior.corrected_seconds(each).tokens_per_second for each in (row, base))
    return reached / of_base


def expected_peak_bytes(posterior: Posterior, row: int) -> int:
    """Return the peak of a candidate's whole model if that was run, else the composed one."""
    whole = posterior.memory.whole_peak(row)
    return posterior.bytes(row).peak if whole is None else whole


def _in_an_epoch(posterior: Posterior, row: int, whole: WholeModelMeasurement) -> WholeModelMeasurement:
    """Return a run with what the first micro-batches of each width add, which its own were not."""
    texts = posterior.surrogate.texts
    if texts is None:
        return whole
    return whole.model_copy(update={"micro_step_seconds": whole.micro_step_seconds + float(texts.new_width_C[row])})


def _whole_step(posterior: Posterior, candidate: Candidate, whole: WholeModelMeasurement) -> StepSeconds:
    """Return the step with the seconds of a whole-model run."""
    return combine_seconds(
        whole.micro_step_seconds,
        whole.optimizer_seconds,
        candidate.micro_batch_size,
        posterior.table.model,
        posterior.request,
        context_parallel_size=candidate.context_parallel_size,
        communication=(whole.communication_seconds or 0.0) if posterior.table.communications else 0.0,
    )


def find_alternatives(
    posterior: Posterior,
    recommended: int,
    report: DeviceReport,
    whole_model_of: Callable[[Candidate], Trial | None],
    runner_up: Candidate | None = None,
    *,
    final: bool = False,
) -> tuple[Alternative, ...]:
    """Return the rows to compare the `recommended` one with; for the `final` answer, all of them.

    `runner_up` is the candidate whose whole model was run, or failed, for comparison.
    """
    table, dividing = posterior.table, recommend_dividing(posterior)
    among = posterior.open_rows() if final else posterior.known_rows()
    is_tiled = table.candidates[recommended].bta_tile is not None
    rows = {
        Role.DIVIDING: None if dividing is None else dividing.row,
        **(memory_rows(posterior, recommended) if final else {}),
        Role.LARGEST_WITHOUT_RECOMPUTE: largest_without_recompute(posterior, among),
        Role.LARGEST_MICRO_BATCH: largest_untiled(posterior, among),
        Role.STOCK: best_stock(posterior, report, among),
        Role.UNTILED: best_untiled(posterior) if final and is_tiled else None,
        Role.UNDIVIDED: best_undivided(posterior) if final else None,
        Role.RUNNER_UP: None if runner_up is None else table.row[runner_up],
    }
    scores = {} if dividing is None else {Role.DIVIDING: confidence_score(dividing.confidence)}
    return tuple(
        compare(posterior, recommended, role, row, whole_model_of(table.candidates[row]), scores.get(role))
        for role, row in rows.items()
        if row is not None
    )


def compare(
    posterior: Posterior,
    recommended: int,
    role: Role,
    row: int,
    whole_model: Trial | None,
    confidence: int | None = None,
) -> Alternative:
    """Return the figures of a row with this role, compared with the `recommended` one; `whole_model` is its run."""
    own, tokens_per_second = (expected_tokens_per_second(posterior, each, recommended) for each in (recommended, row))
    candidate, bytes_ = posterior.table.candidates[row], posterior.bytes(row)
    return Alternative(
        role=role,
        candidate=candidate,
        confidence=confidence,
        tokens_per_second=tokens_per_second,
        ratio=own / tokens_per_second,
        composed_tokens_per_second=posterior.seconds(row).tokens_per_second,
        predicted=not posterior.is_known(row),
        measured_peak_bytes=bytes_.peak,
        required_bytes=bytes_.required,
        grad_accum_steps=accumulate(posterior.request, candidate)[0],
        whole_model=check_whole_model(posterior, row, whole_model),
        outcome=None if whole_model is None else whole_model.measurement.outcome,
        reason=None if whole_model is None else whole_model.measurement.reason,
    )


def accumulate(request: ExplorationRequest, candidate: Candidate) -> tuple[int | None, tuple[int, ...]]:
    """Return the micro-batches of a device in the stated batch, or the nearest batch sizes that divide.

    With such a batch size, every group of devices that share sequences processes one micro-batch at a time. Both are
    empty without a stated batch.
    """
    if request.batch_size is None:
        return None, ()
    unit = _unit(request, candidate)
    if request.batch_size % unit == 0:
        return request.batch_size // unit, ()
    return None, _neighbours(request.batch_size, [unit])


def dividing_rows(table: Composition) -> Mask:
    """Return the candidates that divide the stated batch, shape (C,); none if no batch is stated."""
    request = table.request
    if request.batch_size is None:
        return np.zeros(len(table.candidates), dtype=np.bool_)
    unit_C = table.micro_batch_C * (request.num_devices // table.sharing_C)
    return np.asarray(request.batch_size % unit_C == 0)


def recommend_dividing(posterior: Posterior) -> BestCandidate | None:
    """Return the candidate to recommend among those that divide the stated batch; None if none of them fits.

    It is the recommended one if that divides. The confidence is that among those that divide.
    """
    request, recommended, divides_C = posterior.request, posterior.recommend(), dividing_rows(posterior.table)
    if recommended is not None and divides_C[recommended.row]:
        rows = posterior.contenders.rows
        position = int(np.flatnonzero(rows == recommended.row)[0])
        confidence = posterior.contenders.confidence(position, request.tolerance, among_A=divides_C[rows])
        return BestCandidate(recommended.row, confidence)
    rows = posterior.open_rows()
    return best_among(posterior, rows[divides_C[rows]])


def best_among(posterior: Posterior, rows: Ints) -> BestCandidate | None:
    """Return the one of `rows` with the highest expected throughput, and the confidence among them; None if none fits.

    The search does not aim at these rows, so they need not be known well enough. Rows of which only a measurement tells
    whether they fit are left out. If memory is preferred, the row with the smallest peak within the tolerance is
    returned.
    """
    request, contenders = posterior.request, posterior.contenders_among(rows)
    eligible = np.flatnonzero(contenders.clear_A | posterior.memory.surely_fits(contenders.rows))
    if not eligible.size:
        return None
    best = int(eligible[np.argmax((contenders.mean_A * contenders.runs_A)[eligible])])
    if request.prefer == "memory":
        best = smallest_position(contenders, eligible, best, posterior.memory.required_C, request.tolerance)
    return BestCandidate(int(contenders.rows[best]), contenders.confidence(best, request.tolerance))


def dividing_batch_sizes(posterior: Posterior) -> tuple[int, ...]:
    """Return the nearest batch sizes that a candidate which fits divides; none if no batch is stated."""
    request = posterior.request
    if request.batch_size is None:
        return ()
    fitting = (posterior.table.candidates[row] for row in posterior.open_rows() if posterior.fits(row))
    return _neighbours(request.batch_size, {_unit(request, candidate) for candidate in fitting})


def promising_row(posterior: Posterior) -> int | None:
    """Return the row that would be recommended for its small peak if all predictions about it hold.

    None if the request prefers speed, or if there is nothing to recommend yet.
    """
    contenders, request = posterior.contenders, posterior.request
    if contenders.incumbent is None or request.prefer == "speed":
        return None
    eligible = np.flatnonzero(contenders.clear_A | posterior.memory.surely_fits(contenders.rows))
    best = smallest_position(contenders, eligible, contenders.incumbent, posterior.memory.required_C, request.tolerance)
    return int(contenders.rows[best])


def memory_rows(posterior: Posterior, recommended: int) -> dict[Role, int]:
    """Return the rows of the fastest candidate and of the smallest peaks near it.

    The fastest is the `recommended` row, unless memory is preferred and another is surely faster. A candidate is not
    near if its whole model was slower than the search expects.
    """
    contenders, incumbent = posterior.contenders, posterior.contenders.incumbent
    fastest = posterior.recommended_position
    if fastest is None or incumbent is None:
        return {}
    clear = np.flatnonzero(contenders.clear_A)
    reached = {i: expected_tokens_per_second(posterior, int(contenders.rows[i]), recommended) for i in clear.tolist()}
    if posterior.request.prefer == "memory" and reached[incumbent] > reached[fastest]:
        fastest = incumbent
    by_role = {Role.FASTEST: int(contenders.rows[fastest])}
    for role, within in WITHIN.items():
        near = [i for i in reached if reached[i] >= (1.0 - within) * reached[fastest]]
        position = smallest_position(contenders, np.array(near), fastest, posterior.memory.required_C, within)
        by_role[role] = int(contenders.rows[position])
    return by_role


def largest_untiled(posterior: Posterior, among: Collection[int]) -> int | None:
    """Return the row of the fastest untiled candidate of the largest micro-batch that fits; None if none fits.

    The candidate may not be measured yet.
    """
    rows = [i for i in among if posterior.table.candidates[i].bta_tile is None and posterior.fits(i)]
    if not rows:
        return None
    largest = max(int(posterior.table.micro_batch_C[i]) for i in rows)
    return _fastest(posterior, [i for i in rows if posterior.table.micro_batch_C[i] == largest])


def largest_without_recompute(posterior: Posterior, among: Collection[int]) -> int | None:
    """Return `largest_untiled` among the candidates that recompute nothing."""
    return largest_untiled(posterior, [i for i in among if posterior.table.candidates[i].recompute is Recompute.NONE])


def best_stock(posterior: Posterior, report: DeviceReport, among: Collection[int]) -> int | None:
    """Return the row of the fastest candidate that fits with stock back ends and no batch tiling; None if none does."""
    rows = [
        i
        for i in among
        if posterior.fits(i)
        and (c := posterior.table.candidates[i]).bta_tile is None
        and report.is_stock(c.attention_backend, c.expert_backend)
    ]
    return _fastest(posterior, rows)


def best_untiled(posterior: Posterior) -> int | None:
    """Return the row of the fastest untiled candidate that fits, of a request that names tiles; None if none does.

    It may have to be measured, unless a measured one is expected to be within the tolerance of it.
    """
    if not posterior.request.bta.is_named:
        return None
    untiled = [i for i, c in enumerate(posterior.table.candidates) if c.bta_tile is None]
    rows = [i for i in untiled if posterior.is_open(i) and posterior.fits(i)]
    fastest, known = _fastest(posterior, rows), _fastest(posterior, [i for i in rows if posterior.is_known(i)])
    mean, tolerance = posterior.mean_tokens_per_second(), posterior.request.tolerance
    if fastest is None or known is None:
        return fastest
    return known if mean[known] >= (1.0 - tolerance) * mean[fastest] else fastest


def best_undivided(posterior: Posterior) -> int | None:
    """Return the row of the fastest candidate that fits and does not divide a stated batch with few divisors."""
    sizes = MICRO_BATCH_SIZE.undivided(posterior.request.space.place)
    if not sizes:
        return None
    among = [i for i, c in enumerate(posterior.table.candidates) if c.micro_batch_size in sizes]
    return _fastest(posterior, [i for i in among if posterior.is_open(i) and posterior.fits(i)])


def _fastest(posterior: Posterior, rows: list[int]) -> int | None:
    if not rows:
        return None
    mean = posterior.mean_tokens_per_second()
    return rows[int(np.argmax(mean[rows]))]


def _unit(request: ExplorationRequest, candidate: Candidate) -> int:
    """Sequences that all devices process in one accumulation step."""
    return candidate.micro_batch_size * request.devices.data_parallel_size(candidate.context_parallel_size)


def _neighbours(batch_size: int, units: Collection[int]) -> tuple[int, ...]:
    below = max((batch_size // unit * unit for unit in units), default=0)
    above = min((-(-batch_size // unit) * unit for unit in units), default=0)
    return tuple(size for size in (below, above) if size > 0)
