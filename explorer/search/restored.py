"""The base, whose performance is 1.00x, and the knowledge of an exploration, computed again from its stored trials."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.parts import ExploredModel
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.trial import Trial, TrialKind
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.history import TrialHistory
from bexp.explorer.search.legal_space import PrunedSpace, prune_space
from bexp.explorer.search.noise_limit import NoiseLimit, run_noise, shown_noise
from bexp.explorer.search.posterior import Posterior
from bexp.explorer.search.suggestion import Suggestion
from bexp.explorer.search.whole_models import WholeModels

NOISY = 0.02
"""If two runs of the base's micro-step differ by more than this share, one run is not enough for what rests on it.

A CPU counts as noisy until its runs show otherwise, any other device once they surely show it.
"""
RUNS, LAST_RUNS = 2, 3
"""How often it is then measured before the search goes on, and before the answer."""
TELLING_SHARE = 0.1
"""Components with a smaller share of the micro-step are not measured again."""


class BaseCandidate:
    """Chooses the first of `bases`, in order of preference, that fits."""

    def __init__(self, posterior: Posterior, bases: Sequence[Candidate]) -> None:
        self._posterior = posterior
        self._bases = bases

    def known(self) -> Candidate | None:
        """The first base that fits, if it is measured in full; None if one before it may fit and is not measured."""
        for candidate in self._bases:
            row = self._posterior.table.row[candidate]
            if self._posterior.is_open(row):
                if not self._posterior.is_known(row):
                    return None
                if self._posterior.fits(row):
                    return candidate
        return None

    def again(self, base: Candidate, runs: int) -> Suggestion | None:
        """Another run of the base, which is known, on a noisy device; None once it was run so often.

        What is in flight is not suggested again.
        """
        posterior, table = self._posterior, self._posterior.table
        row = table.row[base]
        noise = run_noise if posterior.hardware.device_kind == "cpu" else shown_noise
        if not posterior.is_open(row) or noise(posterior, row) <= NOISY:
            return None
        shares_P = table.step_shares(posterior.surrogate.device_mean_K, np.array([row]))[0]
        telling = [
            table.components[column]
            for column, share in zip(table.columns_CP[row], shares_P, strict=True)
            if share >= TELLING_SHARE
        ]
        pending = {c for each in posterior.knowledge.pending.values() for c in each.components}
        left = tuple(c for c in telling if posterior.count_attempts(c) < runs and c not in pending)
        return Suggestion(row, left, again=True, reason="runs of the base differ") if left else None


@dataclass(frozen=True, slots=True)
class RestoredKnowledge:
    """The knowledge about a variant's candidates, its noise and its whole models, as the stored trials give it.

    `base` was the base before a whole model was run; None if none was.
    """

    posterior: Posterior
    noise: NoiseLimit
    whole_models: WholeModels
    base: Candidate | None


def restore_space(
    model: ExploredModel, request: ExplorationRequest, report: DeviceReport, trials: Collection[Trial]
) -> PrunedSpace:
    """Return the pruned space of a variant, or the wider one that its trials so far are of.

    Raises EmptySpaceError if the request admits no candidate on this device.
    """
    space = prune_space(model, request, report)
    if space.table is None or all(trial.candidate in space.table.row for trial in trials) or not space.trusted:
        return space
    return prune_space(model, request, report, is_short=True)


def restore_knowledge(
    space: PrunedSpace, request: ExplorationRequest, report: DeviceReport, history: TrialHistory, variant: int = 0
) -> RestoredKnowledge:
    """Return the knowledge about variant number `variant`, from the stored trials of a job."""
    assert space.table is not None, "at least one candidate may fit"
    posterior = Posterior(
        space.table, space.legal.candidates, request, report.hardware, report.reported_runs, report.earlier
    )
    for trial in history.trials_of(space.legal.model.variant):
        if trial.kind is TrialKind.COMPONENTS:
            posterior.knowledge.learn(trial.number, trial.measurement)
    for trial in history.trials:
        posterior.knowledge.learn_shared(trial.number, trial.measurement.components)
    # The base stays what it is when its own whole model fails, or that of another shows that it fits.
    ran_whole = history.whole_models(space.legal.model.variant)
    base = BaseCandidate(posterior, [c for c in space.bases if c in space.table.row]).known() if ran_whole else None
    noise = NoiseLimit(posterior, history, variant)
    return RestoredKnowledge(posterior, noise, WholeModels(posterior, history, variant, noise), base)
