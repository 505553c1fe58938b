"""The interface of a space to the loop: the candidates of one device, or the space of an extension that serves it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from bexp.explorer.cost.components import Component
from bexp.explorer.model.amounts import RateUnit
from bexp.explorer.model.extensions import extensions
from bexp.explorer.model.parts import ExploredModel
from bexp.explorer.records.event import EventDraft
from bexp.explorer.records.measurement import Measurement
from bexp.explorer.records.recommendation import Recommendation, Relaxation
from bexp.explorer.records.trial import Trial, TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.suggestion import Suggestion

if TYPE_CHECKING:
    from bexp.explorer.search.loop import ProgressLog, VariantContext


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The peak bytes of a step and its tokens/s, predicted or measured; None where they are not known."""

    peak_bytes: int | None = None
    tokens_per_second: float | None = None
    rate_unit: RateUnit = RateUnit.TOKENS


@dataclass(frozen=True, slots=True)
class NextCheck:
    """A row to run whole."""

    row: int
    probability_better: float | None = None
    """For a runner-up, that it is better than the recommended one."""
    probability_fits: float | None = None
    """For a candidate above the memory limit as composed, that it fits."""


class SearchSpace(ABC):
    """Enumerates what may be recommended, by rows, and keeps all measurements of it.

    A space says what to measure next, composes steps from measured components, and says which whole model to run.
    Budget, trials in flight, contaminated trials and progress belong to the loop. A space learns the stored trials when
    it is made.
    """

    @abstractmethod
    def prepare(self) -> Iterator[Suggestion]:
        """Yield the measurements that come before any suggestion; each is learnt before the next is asked for."""

    @abstractmethod
    def suggest(self) -> Suggestion | None:
        """Return the next measurement; None if the confidence target is reached, or nothing would change the answer."""

    def compare(self) -> Suggestion | None:
        """Return a measurement that the answer needs and the search has not made; None if there is none."""
        return None

    def split(self, suggestion: Suggestion, most: int) -> Sequence[Suggestion]:
        """Return at most so many parts of a suggestion, which can be in flight at once."""
        return (suggestion,)

    @property
    @abstractmethod
    def is_answered(self) -> bool:
        """Whether there is something to recommend."""

    @property
    @abstractmethod
    def ends_search(self) -> bool:
        """Whether whole models have ended the search for the time being."""

    @property
    def is_refuted(self) -> bool:
        """Whether trials have shown that the space was chosen wrongly, so that another takes its place."""
        return False

    @property
    def is_cut_short(self) -> bool:
        """Whether noise keeps the confidence below its target, or noise or time whole models from raising it."""
        return False

    @abstractmethod
    def begin(self, number: int, suggestion: Suggestion) -> tuple[TrialTask, StepFigures]:
        """Begin trial `number`; return how to run it, and what is expected of its candidate."""

    @abstractmethod
    def learn(
        self, number: int, suggestion: Suggestion, measurement: Measurement, awaited: Collection[Component]
    ) -> tuple[Measurement, StepFigures]:
        """Learn what trial `number` measured; return it, whose outcome may change, and its candidate's figures.

        `awaited` are components of trials in flight and of those that are due.
        """

    @abstractmethod
    def times_contaminated(self, component: Component) -> int:
        """Return how many trials have measured a component on a shared or throttled device."""

    @abstractmethod
    def is_measured(self, component: Component) -> bool:
        """Return whether a component was measured well."""

    @abstractmethod
    def row_of(self, trial: Trial) -> int | None:
        """Return the row of a stored trial of components; None if it is not known, or no row any more."""

    @abstractmethod
    def trial_events(self, suggestion: Suggestion, trial: Trial) -> list[EventDraft]:
        """Return the events of a trial of components."""

    def tell(self, trial: Trial) -> None:  # noqa: B027 - a space may have nobody to tell
        """Take note that a trial of components is stored."""

    @abstractmethod
    def next_whole_model(self) -> NextCheck | None:
        """Return the whole model to run next; None when the answer is settled."""

    @abstractmethod
    def begin_whole_model(self, number: int, check: NextCheck) -> tuple[TrialTask, StepFigures]:
        """Return how to run a whole model, and what is expected of it."""

    @abstractmethod
    def learn_whole_model(self, check: NextCheck, trial: Trial) -> tuple[Trial, list[EventDraft]]:
        """Learn from a whole model; return its trial with what was measured, and its events."""

    @abstractmethod
    def recommend(self, *, final: bool = False) -> Recommendation | None:
        """Return the present recommendation; None while no candidate is known well enough."""

    def importance(self) -> dict[str, float]:
        """Return the importance of each dimension that varies, by name; nothing if the space does not say it."""
        return {}

    @abstractmethod
    def explain(self) -> tuple[str, tuple[Relaxation, ...]]:
        """Return why nothing can be recommended, and the changes that would mend it."""


class SearchExtension(Protocol):
    """The interface of an extension to the search."""

    def models_of(self, request: ExplorationRequest) -> tuple[ExploredModel, ...] | None:
        """Return the models to explore, one after the other; None if it does not serve the request."""

    def open_space(self, context: VariantContext, log: ProgressLog) -> SearchSpace:
        """Return the space of one of the models. Raises EmptySpaceError if it has no candidate."""


def extension_for(request: ExplorationRequest) -> SearchExtension | None:
    """Return the first extension that serves a request; None if the core does."""
    known = (cast(SearchExtension, one) for one in extensions())
    return next((one for one in known if one.models_of(request) is not None), None)
