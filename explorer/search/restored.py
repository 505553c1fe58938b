"""The posterior of an exploration, computed again from what it has stored."""

from __future__ import annotations

from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.trial import TrialKind
from bexp.explorer.search.history import TrialHistory
from bexp.explorer.search.posterior import Posterior
from bexp.explorer.search.pruned_space import PrunedSpace
from bexp.explorer.search.whole_models import WholeModels
from bexp.explorer.spec.request import ExplorationRequest


def restore_posterior(
    space: PrunedSpace, request: ExplorationRequest, report: DeviceReport, history: TrialHistory, variant: int = 0
) -> tuple[Posterior, WholeModels]:
    """Return what the stored trials of a job say of the candidates of its variant number `variant`."""
    assert space.table is not None, "at least one candidate may fit"
    posterior = Posterior.of(
        space.table, space.legal.candidates, request, report.hardware, report.reported_runs, report.earlier
    )
    for trial in history.trials_of(space.legal.model.variant):
        if trial.kind is TrialKind.COMPONENTS:
            posterior.knowledge.learn(trial.number, trial.measurement)
    for trial in history.trials:
        posterior.knowledge.learn_shared(trial.number, trial.measurement.components)
    return posterior, WholeModels(posterior, history, variant)
