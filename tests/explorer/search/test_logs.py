"""The whole log of a few explorations: what people read, and what tools parse, is a contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bexp.explorer.cost.components import Component
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.event import EventCode, Progress
from bexp.explorer.records.measurement import Conditions, Measurement, Outcome
from bexp.explorer.records.run_report import ReportedRun
from bexp.explorer.records.trial import Trial, TrialKind, TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.explore import explore
from tests.explorer.explorations import answer_of
from tests.explorer.explorations import request as experts_request
from tests.explorer.meshes import test_answers as test_mesh_answers
from tests.explorer.meshes import test_meshes
from tests.explorer.search.small import MODEL, REPORT
from tests.explorer.search.small import small_request as tiny_request
from tests.explorer.search.test_earlier_check import with_earlier
from tests.explorer.simulator import SimulatedDevice, report
from tests.recordings import check_recorded

LOGS = Path(__file__).parent / "logs"
LARGE = frozenset({EventCode.RECOMMENDATION, EventCode.SUCCEEDED})
"""Events whose data are an answer: it is compared once, as it is in the end."""


def small_request(**changes: Any) -> ExplorationRequest:
    """A dozen candidates of a model whose kernels take longer than the host needs to launch them."""
    model = {**MODEL, "num_layers": 4, "hidden_size": 1024, "ffn_hidden_size": 4096, "seq_length": 2048}
    return tiny_request(model=model, **changes)


class Device(SimulatedDevice):
    """A simulated device; some trials of it end as `failing` says, by their numbers."""

    def __init__(
        self, req: ExplorationRequest, failing: dict[int, Outcome] | None = None, activations: float = 1.1
    ) -> None:
        # Without noise, candidates would be exactly as good.
        super().__init__(req, noise=0.01, activations=activations)
        self.failing = failing or {}
        self.now = 0.0

    def __call__(self, task: TrialTask) -> Measurement:
        found = super().__call__(task)
        self.now += 1.5 + 0.25 * len(task.components)
        outcome = self.failing.get(task.number)
        if outcome is None:
            return found
        failed = task.components[-1] if task.components else None
        changes: dict[str, Any] = {"outcome": outcome, "reason": "as drawn", "failed_component": failed}
        return found.model_copy(update=changes | {"whole_model": None, "components": found.components[:-1]})


def log_of(steps: Sequence[Progress]) -> list[Any]:
    """Each event with its message and its data, each trial in short, and the answer."""
    rows: list[Any] = []
    for step in steps:
        for event in step.events:
            data = {} if event.code in LARGE else dict(event.data)
            rows.append([int(event.code), event.message, data])
        if step.trial is not None:
            rows.append(trial_row(step.trial))
    answer = answer_of(steps)
    return [*rows, answer.model_dump(mode="json")]


def trial_row(trial: Trial) -> dict[str, Any]:
    return {
        "trial": trial.number,
        "kind": trial.kind.value,
        "outcome": trial.measurement.outcome.value,
        "candidate": trial.candidate.describe(),
        "predicted": [trial.predicted_peak_bytes, trial.predicted_tokens_per_second],
        "measured": [trial.measured_peak_bytes, trial.tokens_per_second],
        "seconds": [trial.suggest_seconds, trial.seconds],
    }


def explored(req: ExplorationRequest, device: Device | None = None, rep: DeviceReport | None = None) -> list[Progress]:
    measure = device or Device(req)
    return list(explore(req, rep or report(memory_gib=40), measure, clock=lambda: measure.now))


def disturbed(req: ExplorationRequest, *numbers: int) -> Device:
    device = Device(req)
    shared = Conditions(foreign_processes=1)

    def conditions(task: TrialTask, component: Component | None) -> Conditions | None:
        return shared if task.number in numbers else None

    device.conditions = conditions
    return device


def dense() -> list[Progress]:
    return explored(small_request(batch_size=24, num_devices=2), rep=REPORT)


def dense_with_failures() -> list[Progress]:
    req = small_request(bta={"enable": True})
    failing = {1: Outcome.OUT_OF_MEMORY, 2: Outcome.CRASHED, 4: Outcome.TIMED_OUT}
    return explored(req, Device(req, failing), REPORT)


def dense_disturbed() -> list[Progress]:
    req = small_request()
    return explored(req, disturbed(req, 1, 2), REPORT)


def reused_and_reported() -> list[Progress]:
    best = explored(tiny_request(), rep=REPORT)[-1].recommendation
    assert best is not None
    runs = (
        ReportedRun(exploration_id="e1", candidate=best.candidate, num_reports=3, speed_ratio=0.95, peak_ratio=1.1),
        ReportedRun(exploration_id="e2", candidate=best.candidate, num_reports=1, speed_ratio=0.97),
    )
    rep = with_earlier(num_ignored=2).model_copy(update={"reported_runs": runs})
    return explored(tiny_request(verify=False), rep=rep)


def variants() -> list[Progress]:
    return explored(small_request(num_query_groups=[4, 2], verify=False), rep=REPORT)


def experts() -> list[Progress]:
    req = experts_request(micro_batch_size=[1, 2, 4, 8], recompute=["none", "selective", "full"])
    return explored(req)


def experts_short_of_memory() -> list[Progress]:
    req = experts_request(memory_limit_gib=10)
    return explored(req, Device(req, activations=1.5))


def nothing_fits() -> list[Progress]:
    return explored(experts_request(memory_limit_gib=2))


def whole_models_fail() -> list[Progress]:
    req = small_request()
    device = Device(req)
    device.failing = {}
    first = explored(req, rep=REPORT)
    checked = next(s.trial.number for s in first if s.trial and s.trial.kind is TrialKind.WHOLE_MODEL)
    device.failing = {checked: Outcome.OUT_OF_MEMORY}
    return explored(req, device, REPORT)


def on_devices(failing: dict[int, Outcome] | None = None, **changes: Any) -> list[Progress]:
    req = test_meshes.request(**changes)
    return explored(req, Device(req, failing), report(memory_gib=40.0, experts=False, num_devices=4))


def two_devices(**changes: Any) -> list[Progress]:
    req = small_request(num_devices=2, batch_size=48, **changes)
    return explored(req, rep=report(memory_gib=40, experts=False, num_devices=2))


def every_component_runs_out() -> list[Progress]:
    req = small_request()
    return explored(req, Device(req, dict.fromkeys(range(100), Outcome.OUT_OF_MEMORY)), REPORT)


def the_device_is_lost() -> list[Progress]:
    class Lost(Device):
        def __call__(self, task: TrialTask) -> Measurement:
            reason = "the device fell off the bus" if task.number % 3 else "the driver was restarted"
            return Measurement(candidate=task.candidate, outcome=Outcome.CRASHED, reason=reason)

    req = small_request()
    return explored(req, Lost(req), REPORT)


def meshes_with_failures() -> list[Progress]:
    return on_devices({0: Outcome.CRASHED, 2: Outcome.OUT_OF_MEMORY, 5: Outcome.CRASHED, 6: Outcome.TIMED_OUT})


def meshes_disturbed() -> list[Progress]:
    req = test_meshes.request()
    whole = [s.trial.number for s in on_devices() if s.trial and s.trial.kind is TrialKind.WHOLE_MODEL]
    device = disturbed(req, 2, *whole)
    return explored(req, device, report(memory_gib=40.0, experts=False, num_devices=4))


def many_devices(**changes: Any) -> list[Progress]:
    return explored(test_mesh_answers.request(**changes), rep=test_mesh_answers.there())


def skewed_experts() -> list[Progress]:
    widths = {"expert_ffn_hidden_size": 1024, "shared_expert_ffn_hidden_size": 1024}
    moe = {"num_experts": 32, "top_k": 4, **widths}
    model = test_mesh_answers.MODEL | {"num_layers": 4, "moe": moe}
    req = test_mesh_answers.request(
        model=model,
        num_devices=8,
        routing={"kind": "zipf"},
        parallelism={"expert": [1, 8], "expert_mode": "explore", "sharding": "zero1"},
    )
    return explored(req, rep=test_mesh_answers.there(48.0, experts=True))


CASES: dict[str, Callable[[], list[Progress]]] = {
    "dense": dense,
    "dense-with-failures": dense_with_failures,
    "dense-disturbed": dense_disturbed,
    "reused-and-reported": reused_and_reported,
    "variants": variants,
    "two-devices": lambda: two_devices(training={"sharding": "zero2"}),
    "shardings": lambda: two_devices(sharding_levels=["none", "zero1", "zero3"], verify=False),
    "sequences-shared": lambda: two_devices(context_parallel={"sizes": [1, 2]}),
    "every-component-runs-out": every_component_runs_out,
    "the-device-is-lost": the_device_is_lost,
    "experts": experts,
    "experts-short-of-memory": experts_short_of_memory,
    "nothing-fits": nothing_fits,
    "whole-models-fail": whole_models_fail,
    "meshes": on_devices,
    "meshes-with-failures": meshes_with_failures,
    "meshes-disturbed": meshes_disturbed,
    "skewed-experts": skewed_experts,
    "named-back-ends": lambda: many_devices(attention_backends=["flash", "cudnn"], flash_attention=False),
}


@pytest.mark.parametrize("name", CASES)
def test_the_log_is_as_it_was_recorded(name: str) -> None:
    check_recorded(LOGS / f"{name}.json", log_of(CASES[name]()))


def test_the_log_of_a_space_too_large_to_rank_at_once_is_as_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bexp.explorer.meshes.space.MOST_SCREENED", 60)
    monkeypatch.setattr("bexp.explorer.meshes.space.BEST_MESHES", 5)
    check_recorded(LOGS / "meshes-ranked-first.json", log_of(many_devices()))
