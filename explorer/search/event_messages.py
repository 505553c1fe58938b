"""The messages and data of the events that an exploration emits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bexp.explorer.cost.components import ComponentKind
from bexp.explorer.cost.parameters import count_parameters
from bexp.explorer.cost.peak_memory import PeakMemory
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.parallelism import Parallelism
from bexp.explorer.model.amounts import bytes_text, rate_text
from bexp.explorer.model.hardware import WITH_ADAPTERS, BackendSupport
from bexp.explorer.model.parts import ExploredModel
from bexp.explorer.model.quantization import WeightBytes, describe_weights
from bexp.explorer.records.event import EventCode, EventDraft
from bexp.explorer.records.measurement import Measurement, Outcome
from bexp.explorer.records.recommendation import WholeModelCheck
from bexp.explorer.records.trial import Trial
from bexp.explorer.search.confidence import confidence_score
from bexp.explorer.search.legal_space import LegalSpace
from bexp.explorer.search.noise_limit import NoiseFigures
from bexp.explorer.search.posterior import Posterior
from bexp.explorer.search.suggestion import Suggestion


def variant_event(model: ExploredModel) -> EventDraft:
    """Return the event that the exploration of a model variant begins."""
    return EventDraft(
        code=EventCode.VARIANT,
        message=f"Exploring the variant with {model.variant.describe()}, a model of its own",
        data={name: value for name, value in model.variant._asdict().items() if value is not None},
    )


def space_event(space: LegalSpace, num_predicted_out: int, limit_bytes: int, *, num_dominated: int = 0) -> EventDraft:
    """Return the event that the legal space has been enumerated."""
    model, limit = space.model, bytes_text(limit_bytes)
    memory = (
        f"{num_predicted_out:,} more left out: predicted not to fit in {limit}"
        if num_predicted_out
        else f"all predicted to fit in {limit}"
    )
    if num_dominated:
        memory += f"; {num_dominated:,} left out: they tile or recompute, and memory is not short"
    return EventDraft(
        code=EventCode.SPACE,
        message=(
            f"{model.title}: {count_parameters(model):,} parameters, {len(space.candidates):,} candidates "
            f"to consider, {memory}"
        ),
        data={
            **space.summarize(),
            "num_predicted_out": num_predicted_out,
            "num_dominated": num_dominated,
            "memory_limit_bytes": limit_bytes,
        },
    )


def wider_space_event(space: LegalSpace, short: Candidate) -> EventDraft:
    """Return the event that memory is short after all, so that candidates are considered that save it."""
    return EventDraft(
        code=EventCode.SPACE,
        message=(
            f"Memory is short: {short.describe()} needs more than predicted. Candidates that tile or recompute are "
            f"considered after all: {len(space.candidates):,} in all"
        ),
        data={**space.summarize(), "num_dominated": 0},
    )


def weights_event(weights: Sequence[WeightBytes]) -> EventDraft:
    """Return the event that says how many bytes of a model's weights are quantised."""
    return EventDraft(
        code=EventCode.WEIGHTS,
        message=f"Weights: {describe_weights(weights)}",
        data={"weights": [one.model_dump(mode="json") for one in weights]},
    )


def adapted_experts_event(backends: Sequence[BackendSupport]) -> EventDraft | None:
    """Return the warning that expert kernels are left out because of adapters on the experts; None if none are."""
    left = [each for each in backends if not each.usable and (each.reason or "").startswith(WITH_ADAPTERS)]
    if not left:
        return None
    reasons = "; ".join(f"'{each.name}' {each.reason}" for each in left)
    return EventDraft(code=EventCode.WARNING, message=f"Expert kernels are left out: {reasons}")


def base_event(base: Candidate, *, is_plainest: bool) -> EventDraft:
    """Return the event that names the base candidate, whose performance is 1.00x."""
    fallback = "" if is_plainest else "; the plainer ones do not fit or fail"
    return EventDraft(
        code=EventCode.BASE,
        message=f"Base (1.00x): {base.describe()}{fallback}",
        data={"candidate": base.model_dump(mode="json")},
    )


def no_base_event() -> EventDraft:
    """Return the warning that no base candidate fits."""
    return EventDraft(
        code=EventCode.WARNING,
        message="No base candidate fits: performance is relative to the first candidate that was measured to fit",
    )


def noise_event(figures: NoiseFigures, target: int) -> EventDraft:
    """Return the warning that noise keeps the confidence below its target, so that the search ends."""
    return EventDraft(
        code=EventCode.WARNING,
        message=f"The search ends because of noise: {describe_noise(figures, target)}",
        data={"run_noise": figures.run_noise, "confidences": figures.confidences},
    )


def describe_noise(figures: NoiseFigures, target: int) -> str:
    """Return in words that noise keeps the confidence below its target."""
    stated = [f"{score} within {float(level):.0%}" for level, score in figures.confidences.items()]
    return (
        f"two runs of a micro-step differ by {figures.run_noise:.1%} here, and no more of them would raise the "
        f"confidence to {target}; it is {', '.join(stated[:-1])} and {stated[-1]} of the best"
    )


def eager_event(posterior: Posterior) -> EventDraft | None:
    """Return the event of the best candidate in eager code, before others are tried; None if none is known."""
    best = posterior.recommend()
    if best is None:
        return None
    candidate, speed = posterior.table.candidates[best.row], posterior.seconds(best.row).tokens_per_second
    confidence = confidence_score(best.confidence)
    return EventDraft(
        code=EventCode.EAGER,
        message=(
            f"Best in eager code: {candidate.describe()}, {rate_text(speed)}, confidence score: {confidence} among "
            "such candidates (out of 100). Compiled layers, CUDA graphs and other losses are tried next"
        ),
        data={"candidate": candidate.model_dump(mode="json"), "tokens_per_second": speed, "confidence": confidence},
    )


def trial_event(trial: Trial, suggestion: Suggestion, seconds: float, memory: PeakMemory | None = None) -> EventDraft:
    """Return the event of a finished trial of components.

    The trial measured a candidate, failed to measure it, or measured the communication that all candidates share.
    `memory` is what fills the candidate's, for one that ran out of it.
    """
    measurement = trial.measurement
    data = {
        "trial": trial.number,
        "candidate": trial.candidate.model_dump(mode="json"),
        "outcome": measurement.outcome.value,
        "tokens_per_second": trial.tokens_per_second,
        "predicted_peak_bytes": trial.predicted_peak_bytes,
        "measured_peak_bytes": trial.measured_peak_bytes,
    }
    if measurement.outcome is Outcome.OK and trial.tokens_per_second is None:
        traffic = next(m for m in measurement.components if m.component.kind is ComponentKind.COMMUNICATION)
        named = "" if traffic.component.sharding is None else f" with sharding {traffic.component.sharding}"
        message = (
            f"Trial {trial.number}: what devices exchange of gradients and parameters{named} takes "
            f"{1e3 * traffic.device_seconds:.1f} ms for the whole model by itself; computation at the same time loses "
            f"{traffic.slowdown or 0.0:.0%} of that time, and the host is busy with it for "
            f"{1e3 * traffic.host_seconds:.1f} ms of each micro-step ({seconds:.1f} s)"
        )
        return EventDraft(code=EventCode.TRIAL, message=message, data=data)
    if measurement.outcome is Outcome.OK:
        number = len(suggestion.components)
        noun = "component" if number == 1 else "components"
        what = f"{number} {noun} again" if suggestion.again else f"{number} new {noun}"
        if trial.candidate.is_whole:
            what = "measured again" if suggestion.again else "measured"
        figures = trial.describe_figures()
        message = f"Trial {trial.number}: {trial.candidate.describe()}: {figures} ({what} in {seconds:.1f} s)"
        return EventDraft(code=EventCode.TRIAL, message=message, data=data)
    if measurement.outcome is Outcome.CONTAMINATED:
        contaminated = ", ".join(m.component.key for m in measurement.components if m.contamination is not None)
        message = f"Contaminated: {trial.candidate.describe()}: {measurement.reason}; not learnt from: {contaminated}"
        return EventDraft(code=EventCode.WARNING, message=message, data={**data, "reason": measurement.reason})
    message = f"Infeasible: {trial.candidate.describe()}: {_failure(measurement, memory)}"
    return EventDraft(code=EventCode.INFEASIBLE, message=message, data={**data, "reason": measurement.reason})


def whole_model_event(
    trial: Trial,
    check: WholeModelCheck | None,
    probability_better: float | None = None,
    probability_fits: float | None = None,
    *,
    mesh: Parallelism | None = None,
    memory: PeakMemory | None = None,
) -> EventDraft:
    """Return the event of a whole-model run of the recommended candidate, of its runner-up, or of one that may fit.

    `check` is None if the run failed. For the runner-up `probability_better` is the probability, before the run, that
    it is better than the recommended candidate. `probability_fits` is that of fitting, for one that does not fit as
    composed. Both are None for the recommended candidate. `mesh` says how
    devices share the model, if they do. `memory` is what fills the candidate's.
    """
    measurement = trial.measurement
    what = f"Whole model with {'' if mesh is None else mesh.describe() + ' '}{trial.candidate.describe()}"
    data: dict[str, Any] = {
        "trial": trial.number,
        "candidate": trial.candidate.model_dump(mode="json"),
        "role": "recommended" if probability_better is None else "runner_up",
    }
    if mesh is not None:
        data["mesh"] = mesh.model_dump(mode="json")
    if probability_better is not None and probability_fits is None:
        what = f"Runner-up, {100 * probability_better:.0f}% likely to be better: {what[0].lower()}{what[1:]}"
        data["probability_better"] = probability_better
    if probability_fits is not None:
        likely = f"{100 * probability_fits:.{0 if probability_fits >= 0.01 else 1}f}% likely to fit"
        why = "No candidate fits as composed" if probability_better is None else "Above the memory limit as composed"
        what = f"{why}, {likely}: {what[0].lower()}{what[1:]}"
        data |= {"role": "may_fit", "probability_fits": probability_fits}
    if check is None:
        return EventDraft(
            code=EventCode.WARNING,
            message=f"{what}: {_failure(measurement, memory)}",
            data={**data, "outcome": measurement.outcome.value, "reason": measurement.reason},
        )
    return EventDraft(
        code=EventCode.WHOLE_MODEL,
        message=(
            f"{what}: {rate_text(check.tokens_per_second)}, "
            f"peak {bytes_text(check.measurement.peak_bytes)}; composed step {100 * check.step_error:+.1f}%, "
            f"composed peak {100 * check.peak_error:+.1f}%"
        ),
        data={**data, "check": check.model_dump(mode="json")},
    )


def _failure(measurement: Measurement, memory: PeakMemory | None) -> str:
    """Return the outcome and its reason, with the largest part of the memory that ran out."""
    text = f"{measurement.outcome}: {measurement.reason or 'no reason given'}"
    if memory is None or measurement.outcome is not Outcome.OUT_OF_MEMORY:
        return text
    return f"{text}; largest at its peak: {memory.describe()}"


def answer_changed_event(before: Candidate, after: Candidate) -> EventDraft:
    """Return the event that a whole-model run has changed the answer."""
    return EventDraft(
        code=EventCode.ANSWER_CHANGED,
        message=f"Whole models change the answer from {before.describe()} to {after.describe()}",
        data={"before": before.model_dump(mode="json"), "after": after.model_dump(mode="json")},
    )
