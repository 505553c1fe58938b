"""The explorer's choice among layouts and sizes, on the devices of benchmarks/context_parallel_step.py."""

from __future__ import annotations

import time
from typing import Any

from bexp.explorer.cost_model.components import Component
from bexp.explorer.records.measurement import ComponentMeasurement, Measurement, Outcome
from bexp.explorer.records.trial import Measure, Trial, TrialKind, TrialPlan
from bexp.explorer.search.explore import explore
from bexp.explorer.spec.hardware import DeviceReport
from bexp.explorer.spec.request import ExplorationRequest


class SharedComponents:
    """A `Measure` that runs components that are equal for all sequence lengths, such as the optimizer, only once."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure
        self._known: dict[Component, ComponentMeasurement] = {}

    def __call__(self, plan: TrialPlan) -> Measurement:
        """Run the components of the plan that are not known, and those that the plan asks to repeat."""
        if plan.kind is TrialKind.WHOLE_MODEL:
            return self._measure(plan)
        known = {} if plan.again else {c: self._known[c] for c in plan.components if c in self._known}
        missing = tuple(c for c in plan.components if c not in known)
        if missing:
            found = self._measure(plan.model_copy(update={"components": missing}))
        else:
            found = Measurement(candidate=plan.candidate, outcome=Outcome.OK)
        for measured in found.components:
            if measured.component.micro_batch_size == 0 and measured.contamination is None:  # no sequences
                self._known[measured.component] = measured
        return found.model_copy(update={"components": (*known.values(), *found.components)})


def search(request: ExplorationRequest, report: DeviceReport, measure: Measure) -> dict[str, Any]:
    """Return the recommended candidate, null if there is none, and how it was found."""
    started = time.monotonic()
    trials: list[Trial] = []
    messages: list[str] = []
    answer = None
    for step in explore(request, report, measure):
        messages += [event.message for event in step.events]
        if step.trial is not None:
            trials.append(step.trial)
        answer = step.answer or answer
    assert answer is not None, "a search ends with an answer"
    best = answer.recommendation
    return {
        "seconds": time.monotonic() - started,
        "num_trials": len(trials),
        "num_components": sum(len(trial.measurement.components) for trial in trials),
        "candidate": best.candidate.model_dump(mode="json") if best else None,
        "reason": answer.variants[0].reason,
        "confidence": best.confidence if best else None,
        "tokens_per_second": best.tokens_per_second if best else None,
        "tolerance": request.tolerance,
        "messages": messages,
    }
