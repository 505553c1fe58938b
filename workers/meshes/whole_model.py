"""A run of the whole model on all ranks of a mesh."""

from __future__ import annotations

import statistics

from bexp.explorer.meshes.mesh import MeshRun
from bexp.explorer.model.model import ModelSpec
from bexp.explorer.records.measurement import WholeModelMeasurement
from bexp.explorer.records.trial import TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.measure.timing import standard_error
from bexp.workers.instruments.device_instruments import Instruments
from bexp.workers.instruments.phases import PhaseClock
from bexp.workers.meshes.training_run import MeshTrainingRun
from bexp.workers.profiler.trials.whole_model import run_steps

MAX_STEPS = 30
"""The most steps of several ranks, which vary more, because each rank has a host process of its own."""


def run_whole_model(
    instruments: Instruments, task: TrialTask, request: ExplorationRequest, clock: PhaseClock
) -> WholeModelMeasurement:
    """Train a few steps of a model on all ranks of a mesh, back to back; the peak is that of this rank.

    Raises:
        UnsupportedTrialError: the model cannot be spread like this.
    """
    model, mesh_run = task.model, task.shared_run
    assert isinstance(model, ModelSpec), "meshes are for reference layers"
    assert isinstance(mesh_run, MeshRun), "the task says on which mesh"
    instruments.settle(release=True)
    run = run_steps(
        instruments,
        lambda: MeshTrainingRun(instruments, model, task.candidate, mesh_run, request),
        clock,
        most_steps=MAX_STEPS,
    )
    steps = [(before.seconds_until(updated), updated.seconds_until(end)) for before, updated, end in run.marks]
    number = mesh_run.num_micro_batches
    computed = [seconds / number for seconds, _ in steps]
    return WholeModelMeasurement(
        micro_step_seconds=statistics.median(computed),
        optimizer_seconds=statistics.median(seconds for _, seconds in steps),
        standard_error_seconds=standard_error(computed) if len(computed) > 1 else 0.0,
        peak_bytes=run.peak_bytes,
        reserved_bytes=run.reserved_bytes,
        repeats=len(steps),
        conditions=run.watch.conditions(),
        num_micro_batches=number,
    )
