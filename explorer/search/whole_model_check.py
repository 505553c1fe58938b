"""Whole models against what their components compose, and the figure to expect of any candidate."""

from __future__ import annotations

from bexp.explorer.cost.step import StepSeconds, combine_seconds
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.records.measurement import Outcome, WholeModelMeasurement
from bexp.explorer.records.recommendation import WholeModelCheck, beside_whole
from bexp.explorer.records.trial import Trial
from bexp.explorer.search.posterior import Posterior


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
