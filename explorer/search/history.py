"""The trials of a job, which all its variants share, and the remaining budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.model import Variant
from bexp.explorer.records.measurement import CONTAMINATED_ATTEMPTS, Outcome
from bexp.explorer.records.trial import Trial, TrialKind
from bexp.explorer.request.request import Budget

GRACE = 2.0
"""Comparisons may use this multiple of the budget, so that every answer has them."""
HOPELESS_FAILURES = 5
HOPELESS_CONTAMINATED = 4 * CONTAMINATED_ATTEMPTS


class TrialHistory:
    """The trials of a job, including those of earlier leases, and the seconds that they took."""

    def __init__(self, history: Sequence[Trial], budget: Budget, num_variants: int) -> None:
        self._trials = list(history)
        self._in_flight: set[int] = set()
        self._budget = budget
        self._num_variants = num_variants

    @property
    def trials(self) -> tuple[Trial, ...]:
        """All of them, in order."""
        return tuple(self._trials)

    @property
    def device_seconds(self) -> float:
        """Seconds that all trials took, without the starts of processes."""
        phases = [trial.measurement.phases for trial in self._trials]
        return sum(p.total - p.process_start for p in phases)

    @property
    def next_number(self) -> int:
        """Number of the job's next trial."""
        return max((*(trial.number for trial in self._trials), *self._in_flight), default=-1) + 1

    def begin(self, number: int) -> None:
        """Begin trial `number`: its number is taken, and it counts for the budget."""
        self._in_flight.add(number)

    def add(self, trial: Trial) -> None:
        """Keep a finished trial."""
        self._in_flight.discard(trial.number)
        self._trials.append(trial)

    def exhausted(self, variant: int) -> bool:
        """Return whether variant number `variant` has used its share of the budget and the rest of earlier variants."""
        return self._spent(variant, 1.0)

    def overdrawn(self, variant: int) -> bool:
        """Whether not even comparisons may be measured any more."""
        return self._spent(variant, GRACE)

    def trials_left(self, variant: int) -> int:
        """Return how many more trials variant number `variant` may begin; negative when it has overdrawn."""
        share = (variant + 1) / self._num_variants
        return int(share * self._budget.max_trials) - len(self._trials) - len(self._in_flight)

    @property
    def seconds_each(self) -> float:
        """The seconds of the budget for each variant."""
        return self._budget.max_seconds / self._num_variants

    def seconds_left(self, variant: int) -> float:
        """Seconds that variant number `variant` has left of its budget; negative when it has overdrawn."""
        return (variant + 1) / self._num_variants * self._budget.max_seconds - _seconds(self._trials)

    def seconds_of(self, variant: Variant) -> float:
        """Seconds that the trials of one variant took."""
        return _seconds(self.trials_of(variant))

    def trials_of(self, variant: Variant) -> list[Trial]:
        """The trials of one variant, in order."""
        return [t for t in self._trials if t.candidate.variant == variant]

    def whole_models(self, variant: Variant) -> list[Trial]:
        """The whole-model runs of one variant, in order."""
        return [t for t in self.trials_of(variant) if t.kind is TrialKind.WHOLE_MODEL]

    def whole_model(self, candidate: Candidate) -> Trial | None:
        """The whole-model run of a candidate: the first that was not contaminated, else the first."""
        runs = [t for t in self._trials if t.kind is TrialKind.WHOLE_MODEL and t.candidate == candidate]
        sound = (t for t in runs if t.measurement.outcome is not Outcome.CONTAMINATED)
        return next(sound, runs[0] if runs else None)

    def is_hopeless(self, variant: Variant) -> bool:
        """Return whether the last trials all failed as a whole, for one and the same reason that is not memory.

        Contamination counts as one reason, whatever contaminated each trial. A contaminated device gets more trials
        than one with another fault, because it may become sound again.
        """
        trials = self.trials_of(variant)
        contaminated = [t.measurement.outcome is Outcome.CONTAMINATED for t in trials[-HOPELESS_CONTAMINATED:]]
        if any(contaminated[-1:]):
            return all(contaminated) and len(contaminated) == HOPELESS_CONTAMINATED
        last = trials[-HOPELESS_FAILURES:]
        failures = {(t.measurement.outcome, t.measurement.reason) for t in last}
        return (
            len(last) == HOPELESS_FAILURES
            and len(failures) == 1
            and last[0].measurement.outcome not in {Outcome.OK, Outcome.OUT_OF_MEMORY}
            and all(t.measurement.failed_component is None for t in last)
        )

    def commonest_failure(self, variant: Variant) -> str | None:
        """The reason that most failed trials of a variant give; None if none failed."""
        failed = [t.measurement for t in self.trials_of(variant) if t.measurement.outcome is not Outcome.OK]
        if not failed:
            return None
        ((outcome, reason), _), *_ = Counter((m.outcome, m.reason) for m in failed).most_common(1)
        return f"{outcome}: {reason or 'no reason given'}"

    def failed_for_memory(self, variant: Variant) -> bool:
        """Whether trials of a variant failed, and all of them because memory was short."""
        outcomes = {t.measurement.outcome for t in self.trials_of(variant)} - {Outcome.OK, Outcome.CONTAMINATED}
        return outcomes == {Outcome.OUT_OF_MEMORY}

    def _spent(self, variant: int, factor: float) -> bool:
        share = factor * (variant + 1) / self._num_variants
        number = len(self._trials) + len(self._in_flight)
        return number >= share * self._budget.max_trials or _seconds(self._trials) >= share * self._budget.max_seconds


def _seconds(trials: Sequence[Trial]) -> float:
    return sum(trial.seconds + trial.suggest_seconds for trial in trials)
