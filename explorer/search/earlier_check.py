"""The check whether the components that earlier explorations measured may be reused.

A few of them are measured again before anything else. If one differs by more than the noise between runs and its age
allow, none is reused. The choice of these components, and how much they may differ, follow from the earlier runs alone.
So a resumed search decides alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from bexp.explorer.cost.components import Component
from bexp.explorer.cost.composition import Composition, Ints
from bexp.explorer.records.device_report import EarlierRuns, ReusedComponents
from bexp.explorer.records.event import EventCode, EventDraft
from bexp.explorer.records.measurement import CONTAMINATED_ATTEMPTS
from bexp.explorer.surrogate.gaussian_process import Surrogate
from bexp.explorer.surrogate.observations import SHORTEST_SECONDS, ComponentObservations, ObservationLog

MOST_CHECKED = 2
"""Components that are measured again."""
MOST_DEVIATIONS = 3.0
"""The earlier runs are dropped if a component differs by more standard deviations than this."""
MOST_DIFFERENCE = math.log(1.1)
"""They are dropped, too, if one differs by more than 10%: where noise alone makes that much, agreement says nothing."""
RUN_QUANTILE = 0.75
"""The noise between two runs is taken from this quantile of its posterior, which is wide if little was measured."""


@dataclass(frozen=True, slots=True)
class CheckedComponent:
    """A component to measure again: the earlier mean of the logarithm of its seconds, and the variance of a new run."""

    component: Component
    log_seconds: float
    variance: float

    def difference(self, run: ComponentObservations) -> float:
        """Return the logarithm of the first new run's seconds over the earlier ones."""
        return math.log(max(run.first.device_seconds, SHORTEST_SECONDS)) - self.log_seconds

    def agrees(self, run: ComponentObservations) -> bool:
        """Whether a new run is as near to the earlier ones as it may be."""
        return abs(self.difference(run)) <= self.allowed

    @property
    def allowed(self) -> float:
        """The largest difference that counts as agreement."""
        return min(MOST_DEVIATIONS * math.sqrt(self.variance), MOST_DIFFERENCE)


@dataclass(frozen=True, slots=True)
class EarlierCheck:
    """The components of the candidate in `row` to measure again."""

    row: int
    checked: tuple[CheckedComponent, ...]

    @property
    def components(self) -> tuple[Component, ...]:
        """The components to measure again."""
        return tuple(one.component for one in self.checked)

    def disagreement(self, runs: Mapping[Component, ComponentObservations]) -> str | None:
        """Return how the new runs differ by too much, in words; None if all of them agree."""
        apart = [one for one in self.checked if not one.agrees(runs[one.component])]
        if not apart:
            return None
        worst = max(apart, key=lambda one: one.difference(runs[one.component]) ** 2 / one.variance)
        difference = math.expm1(worst.difference(runs[worst.component]))
        allowed = math.expm1(worst.allowed)
        return f"{worst.component.key} took {difference:+.1%} against the earlier time, ±{allowed:.1%} may be noise"

    def largest_difference(self, runs: Mapping[Component, ComponentObservations]) -> float:
        """Return the largest share by which a new run differs."""
        return max(abs(math.expm1(one.difference(runs[one.component]))) for one in self.checked)


class ComponentReuse:
    """The reuse of earlier components in one search: undecided until they are checked, then kept or dropped."""

    def __init__(self, earlier: EarlierRuns, check: EarlierCheck, num_components: int) -> None:
        self.check = check
        self.is_decided = False
        self._earlier = earlier
        self._num_components = num_components
        self._reason: str | None = None
        self._largest_difference = 0.0

    @property
    def is_dropped(self) -> bool:
        """Whether the earlier components are not reused."""
        return self._reason is not None

    def judge(self, log: ObservationLog, *, failed: bool) -> None:
        """Decide if that is possible by now; `failed` says whether the last trial did."""
        components = self.check.components
        if all(log.count_own(component) for component in components):
            self._reason = self.check.disagreement(log.runs)
            self._largest_difference = self.check.largest_difference(log.runs)
            self.is_decided = True
        elif failed or any(log.count_contaminated(c) >= CONTAMINATED_ATTEMPTS for c in components):
            self._reason = "they could not be checked"
            self.is_decided = True

    def event(self) -> EventDraft:
        """Return the event that earlier components are reused, or dropped for a reason."""
        number, earlier, reason = self._num_components, self._earlier, self._reason
        jobs, keys = earlier.num_explorations, [component.key for component in self.check.components]
        what = f"{_count(number, 'component')} measured in {_count(jobs, 'earlier exploration')}"
        if reason is None:
            message = f"Reusing {what} on this hardware; measured again and equal within noise: {', '.join(keys)}"
        else:
            message = f"Not reusing {what}: {reason}"
        data = {"reused": reason is None, "num_components": number, "num_explorations": jobs}
        return EventDraft(code=EventCode.REUSED, message=message, data={**data, "checked": keys, "reason": reason})

    def describe(self, num_components: int) -> ReusedComponents | None:
        """Return what an answer owes to the earlier explorations, given how many components still count."""
        if not self.is_decided or self.is_dropped or not num_components:
            return None
        return ReusedComponents(
            num_components=num_components,
            num_explorations=self._earlier.num_explorations,
            num_checked=len(self.check.checked),
            largest_difference=self._largest_difference,
        )


def choose_check(
    table: Composition,
    surrogate: Surrogate,
    earlier: Mapping[Component, ComponentObservations],
    rows: Ints,
    preferred: int | None,
) -> EarlierCheck | None:
    """Choose the components to measure again: those that take most of the time of the likely answer.

    Args:
        table: the candidates and their components.
        surrogate: conditioned on the earlier runs alone.
        earlier: the earlier runs of each component.
        rows: candidates that are expected to fit.
        preferred: the row of the likely answer; None if no candidate is known in full, so that the one with most
            earlier components is taken.

    Returns None if no candidate has an earlier component, or so few that reusing them saves nothing.
    """
    known_K = np.array([component in earlier for component in table.components])
    if rows.size == 0 or known_K.sum() <= MOST_CHECKED:
        return None
    known_AP = table.used_CP[rows] & known_K[table.columns_CP[rows]]
    row = int(rows[np.argmax(known_AP.sum(axis=1))]) if preferred is None else preferred
    used = table.used_CP[row]
    columns = table.columns_CP[row][used]
    shares = table.step_shares(surrogate.device_mean_K, np.array([row]))[0][used]
    order = [int(i) for i in np.argsort(-shares, kind="stable") if known_K[columns[i]] and shares[i] > 0.0]
    chosen = [table.components[columns[i]] for i in order[:MOST_CHECKED]]
    if not chosen:
        return None
    return EarlierCheck(row, tuple(_expected(component, earlier[component], surrogate) for component in chosen))


def ignored_event(earlier: EarlierRuns) -> EventDraft:
    """Return the event that components of other versions are not reused."""
    versions = "; ".join(earlier.other_versions)
    message = f"Not reusing {_count(earlier.num_ignored, 'component')} measured with other versions: {versions}"
    data = {"reused": False, "num_ignored": earlier.num_ignored, "other_versions": list(earlier.other_versions)}
    return EventDraft(code=EventCode.REUSED, message=message, data=data)


def describe_reused(reused: ReusedComponents) -> str:
    """Return one sentence for the answer's notes."""
    return (
        f"{_count(reused.num_components, 'component')} of this search "
        f"{'was' if reused.num_components == 1 else 'were'} measured in "
        f"{_count(reused.num_explorations, 'earlier exploration')}, not in this one; {reused.num_checked} measured "
        f"again differ by at most {reused.largest_difference:.1%}"
    )


def _expected(component: Component, runs: ComponentObservations, surrogate: Surrogate) -> CheckedComponent:
    run_N = surrogate.hyperparameters[component.kind.value].run_N
    between = float(np.quantile(run_N, RUN_QUANTILE)) ** 2
    number = len(runs.runs)
    variance = between + (between + runs.variance_within) / number
    return CheckedComponent(component, runs.log_seconds, variance)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
