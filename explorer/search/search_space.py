"""What the loop searches: candidates of one device, or what an extension has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from bexp.explorer.cost.components import Component
from bexp.explorer.model.amounts import RateUnit
from bexp.explorer.records.event import EventDraft
from bexp.explorer.records.measurement import Measurement
from bexp.explorer.records.recommendation import Recommendation, Relaxation
from bexp.explorer.records.trial import Trial, TrialTask
from bexp.explorer.search.suggestion import Suggestion


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The peak bytes of a step and its tokens/s, predicted or measured; None where they are not known."""

    peak_bytes: int | None = None
    tokens_per_second: float | None = None
    rate_unit: RateUnit = RateUnit.TOKENS


@dataclass(frozen=True, slots=True)
class NextCheck:
    """A row to run whole, and for a runner-up the probability that it is better than the recommended one.

    `probability_fits` is that of fitting, for a candidate above the memory limit as composed.
    """

    row: int
    probability_better: float | None = None
    probability_fits: float | None = None


class SearchSpace(ABC):
    """Enumerates what may be recommended, by rows, and knows what was measured of it.

    It says what to measure next, composes steps from measured components, and says which whole model to run. Budget,
    trials in flight, contaminated trials and progress are the loop's. Stored trials are learnt when it is made.
    """

    # -- what to measure -----------------------------------------------------------------------------------------

    @abstractmethod
    def prepare(self) -> Iterator[Suggestion]:
        """What is measured before anything is suggested; each is learnt before the next is asked for."""

    @abstractmethod
    def suggest(self) -> Suggestion | None:
        """What to measure next; None if the confidence target is reached, or nothing would change the answer."""

    @abstractmethod
    def compare(self) -> Suggestion | None:
        """What the answer needs beside what the search has measured; None if it has all."""

    @abstractmethod
    def split(self, suggestion: Suggestion, most: int) -> Sequence[Suggestion]:
        """A suggestion in at most so many parts, which can be in flight at once."""

    @property
    @abstractmethod
    def is_answered(self) -> bool:
        """Whether there is something to recommend."""

    @property
    @abstractmethod
    def ends_search(self) -> bool:
        """Whether whole models have ended the search: one ran well, or none can be run."""

    @property
    def is_limited_by_noise(self) -> bool:
        """Whether noise keeps the confidence below its target, or whole models from raising it."""
        return False

    # -- trials of components ------------------------------------------------------------------------------------

    @abstractmethod
    def begin(self, number: int, suggestion: Suggestion) -> tuple[TrialTask, StepFigures]:
        """Trial `number` is in flight: how to run it, and what is expected of its candidate."""

    @abstractmethod
    def learn(
        self, number: int, suggestion: Suggestion, measurement: Measurement, awaited: Collection[Component]
    ) -> tuple[Measurement, StepFigures]:
        """Learn what trial `number` measured: its outcome may change, and what it says of its candidate.

        `awaited` are components of trials in flight and of those that are due.
        """

    @abstractmethod
    def times_contaminated(self, component: Component) -> int:
        """How many trials have measured a component on a shared or throttled device."""

    @abstractmethod
    def is_measured(self, component: Component) -> bool:
        """Whether a component was measured well."""

    @abstractmethod
    def row_of(self, trial: Trial) -> int | None:
        """The row of a stored trial of components; None if it is not known, or no row any more."""

    @abstractmethod
    def trial_events(self, suggestion: Suggestion, trial: Trial) -> list[EventDraft]:
        """What a trial of components says."""

    def tell(self, trial: Trial) -> None:  # noqa: B027 - a space may have nobody to tell
        """A trial of components is stored."""

    # -- whole models --------------------------------------------------------------------------------------------

    @abstractmethod
    def next_whole_model(self) -> NextCheck | None:
        """Which whole model to run next; None when the answer is settled."""

    @abstractmethod
    def begin_whole_model(self, number: int, check: NextCheck) -> tuple[TrialTask, StepFigures]:
        """How to run a whole model, and what is expected of it."""

    @abstractmethod
    def learn_whole_model(self, check: NextCheck, trial: Trial) -> tuple[Trial, list[EventDraft]]:
        """Learn from a whole model; returns its trial with what was measured, and what it says."""

    # -- the answer ----------------------------------------------------------------------------------------------

    @abstractmethod
    def recommend(self, *, final: bool = False) -> Recommendation | None:
        """What is recommended now; None while no candidate is known well enough."""

    @abstractmethod
    def explain(self) -> tuple[str, tuple[Relaxation, ...]]:
        """Why nothing can be recommended, and the changes that would mend it."""
