"""What a search of meshes says as it goes: its space, its trials, and what devices exchange."""

from __future__ import annotations

from bexp.explorer.cost.mesh_layers import MeshCandidate
from bexp.explorer.cost.parameters import count_parameters
from bexp.explorer.model.amounts import bytes_text
from bexp.explorer.records.event import EventCode, EventDraft
from bexp.explorer.records.measurement import Outcome
from bexp.explorer.records.trial import Trial
from bexp.explorer.search.mesh_knowledge import MeshKnowledge

GIGA = 1e9


def space_events(space: MeshKnowledge, number: int, base: MeshCandidate | None) -> list[EventDraft]:
    """Return what the space of meshes is, how many candidates are considered at first, and its base."""
    request = space.request
    summary = space.summarize()
    events = [
        EventDraft(
            code=EventCode.SPACE,
            message=(
                f"{request.shapes.name}: {count_parameters(request.shapes):,} parameters on {request.num_devices:,} "
                f"devices, {summary['num_meshes']:,} meshes, {summary['num_candidates']:,} candidates; the best "
                f"{number} by formulas that may fit in {bytes_text(space.limit_bytes)} are measured by their blocks"
            ),
            data={**summary, "memory_limit_bytes": space.limit_bytes},
        )
    ]
    if base is not None:
        data = {"candidate": base.candidate.model_dump(mode="json"), "mesh": base.mesh.model_dump(mode="json")}
        events.append(EventDraft(code=EventCode.BASE, message=f"Base (1.00x): {base.describe()}", data=data))
    return events


def transfers_event(trial: Trial, number: int) -> EventDraft:
    """Return what a trial of `number` transfers says: the highest rate of each."""
    measurement = trial.measurement
    data = {"trial": trial.number, "outcome": measurement.outcome.value}
    if measurement.outcome is not Outcome.OK:
        reason = measurement.reason or "no reason given"
        message = f"What devices exchange could not be measured, and is assumed: {measurement.outcome}: {reason}"
        return EventDraft(code=EventCode.WARNING, message=message, data={**data, "reason": reason})
    timed = [each for each in measurement.components if each.component.exchange is not None and each.device_seconds]
    fastest: dict[str, float] = {}
    for each in timed:
        asked = each.component.exchange
        if asked is not None:
            name = f"{asked.operation} of {asked.size}"
            fastest[name] = max(fastest.get(name, 0.0), asked.num_bytes / each.device_seconds / GIGA)
    rates = [f"{name} {rate:.1f}" for name, rate in fastest.items()]
    message = (
        f"Trial {trial.number}: what devices exchange, {number} measurements in {trial.seconds:.1f} s; "
        f"GB/s at most: {', '.join(rates)}"
    )
    return EventDraft(code=EventCode.TRIAL, message=message, data=data)


def blocks_event(trial: Trial, point: MeshCandidate, number: int) -> EventDraft:
    """Return what a trial says that measured `number` blocks of a candidate."""
    measurement = trial.measurement
    data = {
        "trial": trial.number,
        "candidate": trial.candidate.model_dump(mode="json"),
        "mesh": point.mesh.model_dump(mode="json"),
        "outcome": measurement.outcome.value,
        "tokens_per_second": trial.tokens_per_second,
        "predicted_peak_bytes": trial.predicted_peak_bytes,
        "measured_peak_bytes": trial.measured_peak_bytes,
    }
    if measurement.outcome is Outcome.OK:
        measured = f"{number} new {'component' if number == 1 else 'components'}"
        figures = trial.describe_figures(" of each device")
        message = f"Trial {trial.number}: {point.describe()}: {figures} ({measured} in {trial.seconds:.1f} s)"
        return EventDraft(code=EventCode.TRIAL, message=message, data=data)
    code = EventCode.WARNING if measurement.outcome is Outcome.CONTAMINATED else EventCode.INFEASIBLE
    message = f"{point.describe()}: {measurement.outcome}: {measurement.reason or 'no reason given'}"
    return EventDraft(code=code, message=message, data={**data, "reason": measurement.reason})
