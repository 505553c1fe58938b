"""The knowledge of an exploration, computed again from its stored trials."""

from __future__ import annotations

from dataclasses import dataclass

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.trial import TrialKind
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.base_candidate import BaseCandidate
from bexp.explorer.search.history import TrialHistory
from bexp.explorer.search.noise_limit import NoiseLimit
from bexp.explorer.search.posterior import Posterior
from bexp.explorer.search.pruned_space import PrunedSpace
from bexp.explorer.search.whole_models import WholeModels


@dataclass(frozen=True, slots=True)
class RestoredKnowledge:
    """The knowledge about a variant's candidates, its noise and its whole models, as the stored trials give it.

    `base` was the base before a whole model was run; None if none was.
    """

    posterior: Posterior
    noise: NoiseLimit
    whole_models: WholeModels
    base: Candidate | None


def restore_knowledge(
    space: PrunedSpace, request: ExplorationRequest, report: DeviceReport, history: TrialHistory, variant: int = 0
) -> RestoredKnowledge:
    """Return the knowledge about variant number `variant`, from the stored trials of a job."""
    assert space.table is not None, "at least one candidate may fit"
    posterior = Posterior.of(
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
