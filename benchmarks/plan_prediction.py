"""The predicted step of a plan that admits one mesh, from blocks that are measured as a plan measures them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.kernels_digest import kernels_digest
from bexp.explorer.cost_model.components import Component
from bexp.explorer.cost_model.mesh_layers import MeshCandidate
from bexp.explorer.cost_model.mesh_step import MeshStep
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import ComponentMeasurement, Outcome, judge
from bexp.explorer.records.trial import Measure, TrialKind, TrialTask
from bexp.explorer.search.mesh_knowledge import MeshKnowledge
from bexp.explorer.search.mesh_report import mesh_parts
from bexp.explorer.spec.execution import Execution
from bexp.explorer.spec.request import ExplorationRequest
from bexp.explorer.spec.training import Sharding

TIMEOUT_SECONDS = 120.0


class RowError(Exception):
    """A row cannot be predicted here; the message says why."""


LABELS = ("subject", "kernels")
"""What is stored beside a component's measurement: of which request it is a part, and the digest of the kernels."""


def predict(
    request: ExplorationRequest,
    report: DeviceReport,
    measure: Measure | None,
    components: list[dict[str, Any]],
    save: Callable[[], None],
) -> dict[str, Any]:
    """Return the prediction and its parts. What is measured is added to `components`, each with its LABELS.

    Raises:
        RowError: the row stands for several candidates, or for none, or a block cannot be measured, or `measure` is
            None and a block is missing.
    """
    space = MeshKnowledge(request, report)
    if len(space.candidates) != 1:
        raise RowError(f"the row stands for {len(space.candidates)} candidates")
    mesh_candidate, subject = space.candidates[0], subject_of(request)
    space.learn(
        ComponentMeasurement.model_validate({name: value for name, value in known.items() if name not in LABELS})
        for known in components
        if known["subject"] == subject
    )
    for component in space.missing(mesh_candidate):
        if measure is None:
            raise RowError(f"{component.key} has not been measured")
        measured = measure_block(component, mesh_candidate, request, measure)
        space.learn([measured])
        components.append({"subject": subject, "kernels": kernels_digest(), **measured.model_dump(mode="json")})
        save()
    return describe_step(space, space.step(mesh_candidate, simulate=True), report)


def measure_block(
    component: Component, mesh_candidate: MeshCandidate, request: ExplorationRequest, measure: Measure
) -> ComponentMeasurement:
    """Measure a block as a trial of a plan does; one that was disturbed is measured again, once.

    Raises:
        RowError: it cannot be measured.
    """
    task = TrialTask(
        number=0,
        kind=TrialKind.COMPONENTS,
        model=request.shapes,
        candidate=mesh_candidate.candidate,
        components=(component,),
        timeout_seconds=TIMEOUT_SECONDS,
    )
    done = judge(measure(task))
    if done.outcome is Outcome.CONTAMINATED:
        done = judge(measure(task))
    if done.outcome is not Outcome.OK:
        raise RowError(f"{component.key}: {done.outcome}: {done.reason or 'no reason given'}")
    return done.components[0]


def subject_of(request: ExplorationRequest) -> str:
    """Return what two requests must share for their blocks of the same name to be the same."""
    training = request.training.model_copy(update={"sharding": Sharding.NONE})
    same = [request.shapes.model_dump_json(exclude_defaults=True), training.model_dump_json(exclude_defaults=True)]
    if request.plain_execution is not Execution.EAGER:
        same.append(request.plain_execution)
    return " ".join(same)


def describe_step(space: MeshKnowledge, step: MeshStep, report: DeviceReport) -> dict[str, Any]:
    """Return the predicted throughput and the parts of the step."""
    kernels = {"attention": report.default_attention, "experts": report.default_experts}
    return {
        "predicted": step.tokens_per_second,
        "kernels": kernels,
        "step_seconds": step.seconds,
        "micro_step_seconds": step.micro_step_seconds,
        "optimizer_seconds": step.optimizer_seconds,
        "communication_seconds": step.communication_seconds,
        "num_micro_batches": step.num_micro_batches,
        "compute_share": step.compute_share,
        "exchange_share": step.exchange_share,
        "bubble_share": step.bubble_share,
        "layers": list(step.layers),
        "memory_bytes": step.memory.total,
        "parts": [part.model_dump(mode="json") for part in mesh_parts(space, step)],
    }
