"""Whole models on the devices of a mesh: which to run, and the corrections of composed steps that follow from them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import fmean

from bexp.explorer.meshes.knowledge import LEAST_ERROR, MeshKnowledge
from bexp.explorer.meshes.layers import MeshCandidate
from bexp.explorer.meshes.mesh import Mesh, MeshRun
from bexp.explorer.meshes.posterior import COMPOSITION_ERROR, Expected
from bexp.explorer.meshes.step import MeshStep
from bexp.explorer.records.measurement import CONTAMINATED_ATTEMPTS, Outcome
from bexp.explorer.records.recommendation import WholeModelCheck
from bexp.explorer.records.trial import Trial, TrialKind
from bexp.explorer.search.whole_models import REFUTING

MOST_RUN = 6
"""The most whole models of an exploration."""
LEAST_CHANCE = 0.05
"""A candidate that is less likely than this to be the best is not run whole in addition to the recommended one."""
MOST_TIMED_OUT = 2
"""Whole models that pass the trial's deadline before no other is run, since another mesh would hardly be faster."""
MOST_MICRO_BATCHES = 4
"""Micro-batches that a whole model runs for each stage of its pipeline, at most; a further one adds the same time."""


class MeshChecks:
    """The whole models of one exploration. Every decision depends on the stored trials alone."""

    def __init__(self, space: MeshKnowledge) -> None:
        self._space = space
        self._ran: dict[MeshCandidate, Trial] = {}
        self.refuted: dict[MeshCandidate, str] = {}
        self._number = 0
        self._compared: dict[tuple[MeshCandidate, int, int], WholeModelCheck | None] = {}
        self._refused: dict[Mesh, str] = {}
        self._timed_out = 0
        self._contaminated = 0

    def learn(self, trials: Iterable[Trial]) -> None:
        """Take in trials of whole models; others say nothing here."""
        for trial in trials:
            run = trial.shared_run
            if trial.kind is not TrialKind.WHOLE_MODEL or not isinstance(run, MeshRun):
                continue
            outcome, point = trial.measurement.outcome, MeshCandidate(run.mesh, trial.candidate)
            self._number += 1
            if outcome is Outcome.OK:
                self._ran[point] = trial
            elif outcome in REFUTING:
                self.refuted[point] = f"{outcome}: {trial.measurement.reason or 'no reason given'}"
            elif outcome is Outcome.CONTAMINATED:
                self._contaminated += 1
            else:
                self._refused[point.mesh] = f"{outcome}: {trial.measurement.reason or 'no reason given'}"
                self._timed_out += outcome is Outcome.TIMED_OUT

    def next(self, ranked: list[MeshCandidate], best: MeshCandidate, chances: list[float]) -> MeshCandidate | None:
        """Return the next row to run whole: the recommended one, then the likeliest to be better; None at the end.

        `ranked` are candidates whose blocks are measured, and `chances` their probabilities to be the best. A mesh that
        ranks cannot run, or not before the trial's deadline, does not exclude other meshes.
        """
        is_over = self._number >= MOST_RUN or self._timed_out >= MOST_TIMED_OUT
        if is_over or self._contaminated >= CONTAMINATED_ATTEMPTS:
            return None
        if self._is_open(best):
            return best
        rivals = [(chance, i) for i, chance in enumerate(chances) if self._is_open(ranked[i])]
        chance, i = max(rivals, default=(0.0, -1))
        return ranked[i] if chance >= LEAST_CHANCE else None

    def _is_open(self, point: MeshCandidate) -> bool:
        return point not in self._ran and point.mesh not in self._refused

    def refusal(self, mesh: Mesh) -> str | None:
        """Return why no whole model of a mesh runs; None if one may."""
        return self._refused.get(mesh)

    def run_of(self, point: MeshCandidate, step: MeshStep) -> MeshRun:
        """Return the whole model of a candidate, with as many micro-batches as its step has, or enough of them."""
        most = MOST_MICRO_BATCHES * point.mesh.num_stages
        return MeshRun(
            mesh=point.mesh, layers_per_stage=step.layers, num_micro_batches=min(step.num_micro_batches, most)
        )

    def expected(self, point: MeshCandidate) -> Expected:
        """Return the seconds to expect: by its own whole model if that was run, else by those of others."""
        check = self.of(point)
        if check is not None:
            whole = check.measurement
            relative = whole.standard_error_seconds / whole.micro_step_seconds if whole.micro_step_seconds else 0.0
            return Expected(1.0 / (1.0 + check.step_error), max(LEAST_ERROR, relative), is_own=True)
        others = [math.log1p(other.step_error) for each in self._ran if (other := self.of(each)) is not None]
        if not others:
            return Expected()
        mean = fmean(others)
        spread = math.sqrt(fmean((each - mean) ** 2 for each in others)) if len(others) > 1 else abs(mean) / 2
        return Expected(math.exp(-mean), math.hypot(COMPOSITION_ERROR, spread))

    def of(self, point: MeshCandidate) -> WholeModelCheck | None:
        """Return the whole model of a candidate, compared with its composed step; None if it did not run."""
        key = (point, self._number, len(self._space.measured))
        if key not in self._compared:
            self._compared[key] = self._compare(point)
        return self._compared[key]

    def _compare(self, point: MeshCandidate) -> WholeModelCheck | None:
        trial = self._ran.get(point)
        if trial is None or trial.measurement.whole_model is None or not isinstance(trial.shared_run, MeshRun):
            return None
        whole = trial.measurement.whole_model
        composed = self._space.step(point, simulate=True, run=trial.shared_run)
        error = composed.seconds / whole.shared_step_seconds - 1.0
        step = self._space.step(point, simulate=True)
        return WholeModelCheck(
            measurement=whole,
            tokens_per_second=step.tokens_per_second * (1.0 + error),
            step_seconds=step.seconds / (1.0 + error),
            step_error=error,
            peak_error=composed.memory.total / whole.peak_bytes - 1.0,
        )

    def runner_up_of(self, best: MeshCandidate) -> MeshCandidate | None:
        """Return the fastest other candidate that was run whole; None if there is none."""
        speeds = {each: check.tokens_per_second for each in self._ran if (check := self.of(each)) is not None}
        others = [each for each in speeds if each != best]
        return max(others, key=speeds.__getitem__) if best in speeds and others else None
