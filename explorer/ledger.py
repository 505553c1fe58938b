"""What all variants of a job share: the stored trials, and what is left of the budget."""

from __future__ import annotations

from collections.abc import Sequence

from explorer.candidates import Candidate
from explorer.requests import Budget
from explorer.trials import Trial, TrialKind

GRACE = 2.0  # comparisons at the end may use this many times the budgeted seconds, so that an answer has them


class Ledger:
    """Trials of a job, earlier leases' included, and the seconds that they took."""

    def __init__(self, history: Sequence[Trial], budget: Budget, num_variants: int) -> None:
        self._trials = list(history)
        self._spent_seconds = sum(trial.measurement.phases.total + trial.suggest_seconds for trial in history)
        self._budget = budget
        self._num_variants = num_variants

    @property
    def next_number(self) -> int:
        """Number of the job's next trial."""
        return max((trial.number for trial in self._trials), default=-1) + 1

    def add(self, trial: Trial, seconds: float) -> None:
        """Keep a finished trial that took `seconds`, messages included."""
        self._trials.append(trial)
        self._spent_seconds += seconds

    def exhausted(self, variant: int) -> bool:
        """Whether variant number `variant` has used its share of the budget; what earlier ones left over is its own."""
        share = (variant + 1) / self._num_variants
        budget = self._budget
        return len(self._trials) >= share * budget.max_trials or self._spent_seconds >= share * budget.max_seconds

    def overdrawn(self, variant: int) -> bool:
        """Whether not even the comparisons at the end may be measured."""
        return self._spent_seconds >= GRACE * (variant + 1) / self._num_variants * self._budget.max_seconds

    def trials_of(self, num_query_groups: int) -> list[Trial]:
        """The trials of one variant, in order."""
        return [t for t in self._trials if t.candidate.num_query_groups == num_query_groups]

    def whole_model(self, candidate: Candidate) -> Trial | None:
        """The whole-model run of a candidate."""
        found = (t for t in self._trials if t.kind is TrialKind.WHOLE_MODEL and t.candidate == candidate)
        return next(found, None)
