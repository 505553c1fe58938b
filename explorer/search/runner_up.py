"""The runner-up: the candidate to run whole next, beside the recommended one.

The gain of a run is the expected improvement of the answer after it: the knowledge gradient (Frazier, Powell and
Dayanik, 2009). A run is noisy, so it tells only a share of what is unknown about the difference of two candidates.
Where runs differ by as much as the candidates may, another run gains little, however uncertain the answer is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from explorer.cost_model.candidate_table import Floats
from explorer.search.preference import recommended_position
from explorer.search.search_state import SearchState

MATTERS = 0.25
"""Share of the tolerance by which a runner-up must be faster for its whole model to be worth a run."""
MOST_WHOLE_RUNS = 3
"""The most whole models of one candidate, unless it is the recommended one."""
TINY = 1e-12  # no division by zero where nothing is uncertain


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """The row of a candidate to run whole.

    `probability` is that of being faster than the recommended candidate by more than MATTERS of the tolerance. `gain`
    is the expected improvement by its run, as a share of the recommended candidate's throughput.
    """

    row: int
    probability: float
    gain: float


def find_runner_up(state: SearchState) -> RunnerUp | None:
    """Return the candidate whose whole model is expected to improve the answer most; null if there is none to run.

    It is the contender whose run has the highest expected gain over the recommended candidate. What is not known
    counts: the error of its composition, whether it fits, components that were predicted, and the noise of whole
    models that ran. If two are equal, it is the faster one. If another run of the recommended candidate gains more, the
    recommended candidate is returned. Without a recommended candidate it is the best of those that may fit.
    """
    posterior, rows = state.posterior, state.posterior.rows
    recommended = recommended_position(posterior, state.required_bytes_C, state.request)
    number_A = np.array([state.whole_models.count(int(row)) for row in rows])
    others = [i for i in range(rows.size) if i != recommended and number_A[i] < MOST_WHOLE_RUNS]
    if recommended is None:
        others = [i for i in others if not number_A[i]]
    if not others:
        return None
    if recommended is None:
        best = max(others, key=lambda i: (posterior.tokens_NA[:, i].mean(), posterior.mean_A[i]))
        return RunnerUp(int(rows[best]), float(posterior.runs_A[best]), 1.0)
    by_its_own_A, by_recommended_A = _gains(posterior.tokens_NA, state.next_run_std(rows), recommended)
    faster_A = posterior.probability_faster(recommended, state.request.tolerance * MATTERS)
    best = max(others, key=lambda i: (by_its_own_A[i], posterior.mean_A[i]))
    rival = max(others, key=lambda i: (by_recommended_A[i], posterior.mean_A[i]))
    if number_A[recommended] and by_recommended_A[rival] > by_its_own_A[best]:
        return RunnerUp(int(rows[recommended]), float(faster_A[rival]), float(by_recommended_A[rival]))
    return RunnerUp(int(rows[best]), float(faster_A[best]), float(by_its_own_A[best]))


def _gains(tokens_NA: Floats, run_std_A: Floats, recommended: int) -> tuple[Floats, Floats]:
    """Return the expected gains over the recommended candidate by a run of each contender, and of the former itself.

    Both have the shape (A,). `run_std_A` is the relative noise of one run. If x is what the run measures, its noise
    apart, and d the lead over the recommended candidate, then the run moves the expected lead by a standard deviation
    of |cov(d, x)| / sqrt(var(x) + noise^2). The samples of the lead are drawn together until they have that deviation.
    """
    tokens_NA = tokens_NA / max(float(tokens_NA[:, recommended].mean()), 1e-9)
    mean_A = tokens_NA.mean(axis=0)
    around_NA = tokens_NA - mean_A
    own_N1 = around_NA[:, [recommended]]
    lead_A, ahead_NA = mean_A - mean_A[recommended], around_NA - own_N1
    noise_A = run_std_A * mean_A
    by_its_own_A = _told(ahead_NA, around_NA, noise_A)
    by_recommended_A = _told(ahead_NA, own_N1, noise_A[recommended])
    gain_A = np.maximum(0.0, lead_A + by_its_own_A * ahead_NA).mean(axis=0)
    # What leads already, and is not recommended because it is not known well enough, gains nothing by others' runs.
    other_A = np.maximum(0.0, lead_A + by_recommended_A * ahead_NA).mean(axis=0) - np.maximum(0.0, lead_A)
    return gain_A, other_A


def _told(ahead_NA: Floats, measured_NA: Floats, noise_A: Floats) -> Floats:
    """Return the share of the leads' standard deviations that runs tell, shape (A,): at most 1."""
    moved_A = np.abs((ahead_NA * measured_NA).mean(axis=0)) / np.sqrt(measured_NA.var(axis=0) + noise_A**2 + TINY)
    return np.asarray(np.minimum(1.0, moved_A / np.maximum(ahead_NA.std(axis=0), TINY)))
