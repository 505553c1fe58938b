"""What is believed after a few trials, as recorded: the surrogate, memory, confidence, and what is worth measuring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bexp.explorer.records.device_report import DeviceReport, EarlierRun, EarlierRuns
from bexp.explorer.records.measurement import Conditions, Outcome
from bexp.explorer.records.run_report import ReportedRun
from bexp.explorer.records.trial import TrialKind, TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.alternatives import compare, dividing_batch_sizes, memory_rows, promising_row
from bexp.explorer.search.posterior import Posterior
from bexp.explorer.search.samplers import suggest_measurement
from bexp.explorer.search.whole_models import find_above_limit, find_runner_up
from tests.explorer.explorations import pruned
from tests.explorer.explorations import request as experts_request
from tests.explorer.search.small import small_request
from tests.explorer.simulator import SimulatedDevice, report
from tests.recordings import check_recorded

BELIEFS = Path(__file__).parent / "beliefs"
ROWS = 12
NUM_TRIALS = 6
CASES: dict[str, dict[str, Any]] = {
    "experts": {"experts": True, "micro_batch_size": [1, 2, 4, 8], "batch_size": 24},
    "short-of-memory": {"experts": True, "memory_limit_gib": 12, "headroom": 0.05},
    "dense": {"bta": {"enable": True}, "recompute": ["none", "selective", "full", "partial_50"]},
    "two-devices": {"num_devices": 2, "training": {"sharding": "zero3"}, "batch_size": 32},
    "executions": {"executions": ["eager", "graph"], "micro_batch_size": [1, 4]},
    "evaluation": {"experts": True, "mode": "eval", "micro_batch_size": [1, 2, 4]},
}


def asked(name: str) -> ExplorationRequest:
    changes = dict(CASES[name])
    return experts_request(**changes) if changes.pop("experts", False) else small_request(**changes)


def posterior_of(req: ExplorationRequest, rep: DeviceReport) -> Posterior:
    space = pruned(req.shapes, req, rep)
    assert space.table is not None
    return Posterior(space.table, space.legal.candidates, req, rep.hardware, rep.reported_runs, rep.earlier)


def row_plan(posterior: Posterior, number: int, row: int) -> TrialTask:
    return TrialTask(
        number=number,
        kind=TrialKind.COMPONENTS,
        model=posterior.table.model,
        candidate=posterior.table.candidates[row],
        components=posterior.missing(row),
        timeout_seconds=1.0,
    )


def beliefs(posterior: Posterior) -> dict[str, Any]:
    """What is known of some rows, and what follows from it."""
    table, surrogate, memory = posterior.table, posterior.surrogate, posterior.memory
    rows = np.arange(0, len(table.candidates), max(1, len(table.candidates) // ROWS))
    columns = np.arange(0, len(table.components), max(1, len(table.components) // ROWS))
    best, rival, above = posterior.recommend(), find_runner_up(posterior), find_above_limit(posterior)
    suggested = suggest_measurement(posterior)
    found: dict[str, Any] = {
        "device": surrogate.device_mean_K[columns].tolist(),
        "std": surrogate.log_std_K[columns].tolist(),
        "tokens_per_second": posterior.mean_tokens_per_second()[rows].tolist(),
        "seconds": [posterior.seconds(int(row)).step for row in rows],
        "corrected": [posterior.corrected_seconds(int(row)).step for row in rows],
        "peak": [posterior.bytes(int(row)).peak for row in rows],
        "required": [posterior.bytes(int(row)).required for row in rows],
        "fits": [posterior.fits(int(row)) for row in rows],
        "open": [posterior.is_open(int(row)) for row in rows],
        "tight": memory.is_tight(rows).tolist(),
        "near": memory.is_near_limit(rows).tolist(),
        "smallest": posterior.smallest_row,
        "confidence": posterior.search_confidence,
        "best": None if best is None else [best.row, best.confidence],
        "rival": None if rival is None else [rival.row, rival.probability, rival.gain, rival.probability_fits],
        "above": None if above is None else [above.row, above.probability, above.gain],
        "promising": promising_row(posterior),
    }
    if best is not None:
        choices = (compare(posterior, best.row, *item, None) for item in memory_rows(posterior, best.row).items())
        found["memory_choices"] = [each.model_dump(mode="json", exclude={"whole_model"}) for each in choices]
        found["wanted"] = [component.key for component in posterior.wanted(best.row)]
        found["batches"] = dividing_batch_sizes(posterior)
    if suggested is not None:
        found["suggested"] = [suggested.row, [c.key for c in suggested.components], suggested.again, suggested.reason]
    return found


@pytest.mark.parametrize("name", CASES)
def test_what_is_believed_after_a_few_trials_is_as_recorded(name: str) -> None:
    req, rep = asked(name), report(memory_gib=40, num_devices=2)
    posterior, device = posterior_of(req, rep), SimulatedDevice(req, noise=0.01)
    disturbed = Conditions(foreign_processes=1)
    device.conditions = lambda plan, component: disturbed if plan.number == 3 else None
    found = [beliefs(posterior)]
    for number in range(NUM_TRIALS):
        suggestion = suggest_measurement(posterior)
        row = posterior.smallest_row if number == 0 or suggestion is None else suggestion.row
        if not posterior.missing(row):
            break
        posterior.knowledge.learn(number, device(row_plan(posterior, number, row)))
        found.append(beliefs(posterior))
    best = posterior.recommend()
    if best is not None:
        candidate = posterior.table.candidates[best.row]
        speed, peak = float(posterior.mean_tokens_per_second()[best.row]), posterior.bytes(best.row).peak
        posterior.knowledge.learn_whole_model(candidate, 0.97 * speed, 0.004, round(1.02 * peak), 90)
        found.append(beliefs(posterior))
        posterior.knowledge.learn_whole_model(candidate, 0.98 * speed, 0.004, round(1.03 * peak), 91)
        found.append(beliefs(posterior))
        posterior.knowledge.reject(candidate, "its whole model ran out of memory", too_large=True)
        found.append(beliefs(posterior))
    check_recorded(BELIEFS / f"{name}.json", found, relative=1e-3)


def test_what_earlier_and_reported_runs_say_is_as_recorded() -> None:
    req, rep = asked("dense"), report(memory_gib=40)
    device, posterior = SimulatedDevice(req, noise=0.01), posterior_of(req, rep)
    measured = device(row_plan(posterior, 0, posterior.smallest_row)).components
    runs = tuple(
        EarlierRun(measurement=each, age_seconds=86_400.0 * (1 + index)) for index, each in enumerate(measured)
    )
    candidate = posterior.table.candidates[posterior.smallest_row]
    reported = (
        ReportedRun(exploration_id="e1", candidate=candidate, num_reports=2, speed_ratio=0.9, peak_ratio=1.2),
        ReportedRun(
            exploration_id="e2",
            candidate=posterior.table.candidates[-1],
            num_reports=1,
            speed_ratio=1.0,
            peak_ratio=1.1,
        ),
    )
    known = rep.model_copy(update={"earlier": EarlierRuns(runs=runs, num_explorations=1), "reported_runs": reported})
    again = posterior_of(req, known)
    found = [beliefs(again)]
    again.knowledge.learn(1, device(row_plan(again, 1, len(again.table.candidates) // 2)))
    found.append(beliefs(again))
    failed = device(row_plan(again, 2, len(again.table.candidates) - 1))
    last = failed.components[-1].component if failed.components else None
    outcome = {"outcome": Outcome.CRASHED, "reason": "drawn", "failed_component": last, "components": ()}
    again.knowledge.learn(2, failed.model_copy(update=outcome))
    found.append(beliefs(again))
    check_recorded(BELIEFS / "earlier.json", found, relative=1e-3)
