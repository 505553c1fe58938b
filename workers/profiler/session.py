"""Answers to the commands of the parent, one after another."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial

from bexp.error_place import place_of
from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.cost.step import memory_limit
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.base import Frozen
from bexp.explorer.model.model import ModelSpec
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import ComponentMeasurement, Measurement, Outcome, WholeModelMeasurement
from bexp.explorer.records.trial import TrialKind, TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.measure.heap import freeze_imports
from bexp.workers.instruments.compilation import missing_compiler
from bexp.workers.instruments.device_instruments import Instruments
from bexp.workers.instruments.failures import TargetKilledError, UnsupportedTrialError, classify, is_poisoned
from bexp.workers.instruments.phases import PhaseClock
from bexp.workers.instruments.rank_group import RankGroup, single_rank
from bexp.workers.process.protocol import (
    Begin,
    Command,
    ComponentMeasured,
    ComponentStarted,
    EndJob,
    HardwareReply,
    MeasureHardware,
    ReportReply,
    RunTrial,
    TrialFinished,
)
from bexp.workers.profiler.hardware import measure_hardware
from bexp.workers.profiler.trials.component import measure_component, measure_optimizer
from bexp.workers.profiler.trials.data_parallel_communication import measure_data_parallel_communication
from bexp.workers.profiler.trials.whole_model import run_whole_model
from bexp.workers.targets.choice import import_target, open_target
from bexp.workers.targets.extensions import extension_for
from bexp.workers.targets.target import ProfiledTarget, WholeTarget

CALM_SECONDS = 5.0
"""The longest that a trial waits for the device to become calm if the previous trial was disturbed."""


class Session:
    """The state of a profiler process: its instruments and its job."""

    def __init__(
        self,
        instruments: Instruments,
        used_before: int | None,
        send: Callable[[Frozen], None],
        select_ranks: Callable[[TrialTask], RankGroup] = single_rank,
    ) -> None:
        self._instruments = instruments
        self._used_before = used_before
        self._send = send
        self._select_ranks = select_ranks
        self._request: ExplorationRequest | None = None
        self._was_disturbed = False  # in the last trial, by other processes or by throttling
        self._target: ProfiledTarget | WholeTarget | None = None

    @property
    def has_job(self) -> bool:
        """Whether a job has begun and is not over."""
        return self._request is not None

    def answer(self, command: Command) -> bool:
        """Execute a command; return False if this process cannot execute another one."""
        if isinstance(command, MeasureHardware):
            self._send(HardwareReply(hardware=measure_hardware(self._instruments.device, self._used_before)))
        elif isinstance(command, Begin):
            self._begin(command)
        elif isinstance(command, RunTrial):
            return self._run_trial(command.task)
        elif isinstance(command, EndJob):
            self._end_job()
        return True

    def _end_job(self) -> None:
        """Release the memory of the last job's target on the device and on the host."""
        if isinstance(self._target, WholeTarget):
            self._target.close()
        self._request, self._target = None, None
        self._instruments.settle(release=True)

    def _begin(self, command: Begin) -> None:
        request, hardware = command.request, command.hardware
        self._end_job()
        builder = self._instruments.kernels
        if builder is not None and command.known_report is None and "expert" in str(request.hf_config):
            builder.start()  # it imports torch while this process imports the target's library
        import_target(request.target_name)
        freeze_imports()  # earlier jobs may have imported more
        self._request = request
        self._instruments.use_allocator(request.allocator)
        try:
            self._target = open_target(request, self._instruments)
            known = None if isinstance(self._target, WholeTarget) else command.known_report
            report = known or self._target.report(hardware)
        except Exception as error:  # whatever a model's code raises is the job's outcome
            if is_poisoned(self._instruments.device):
                raise  # this process is of no use any more
            outcome, reason = classify(error)
            if outcome is Outcome.CRASHED:
                traceback.print_exc()
                reason += place_of(error)
            report = DeviceReport.refused(hardware, reason)
        if builder is not None:
            builder.close()  # no kernel is built while something is timed
        self._instruments.settle(release=True)
        self._instruments.limit_memory(memory_limit(request, hardware), hardware.context_bytes)
        others_bytes = self._instruments.monitor.begin(command.others_bytes)
        self._was_disturbed = False
        self._send(ReportReply(report=report, others_bytes=others_bytes))

    def _run_trial(self, task: TrialTask) -> bool:
        assert self._request is not None, "a job has begun"
        clock = PhaseClock()
        if self._was_disturbed:
            self._instruments.monitor.wait_until_calm(CALM_SECONDS)
        measurement, target_killed = self._attempt(task, self._request, clock)
        poisoned = self._is_lost(measurement)
        if not poisoned:
            kept = 0 if self._target is None or isinstance(self._target, WholeTarget) else self._target.rest()
            release = measurement.outcome is Outcome.OUT_OF_MEMORY or task.kind is TrialKind.WHOLE_MODEL
            poisoned = self._instruments.settle(release=release, kept_bytes=kept) > 0
        measurement = measurement.model_copy(update={"phases": clock.seconds()})
        self._was_disturbed = measurement.contamination is not None
        seconds = clock.elapsed_seconds
        self._send(
            TrialFinished(measurement=measurement, seconds=seconds, poisoned=poisoned, target_killed=target_killed)
        )
        return not poisoned

    def _attempt(self, task: TrialTask, request: ExplorationRequest, clock: PhaseClock) -> tuple[Measurement, bool]:
        """Measure a task. An exception becomes the outcome, next to the measurements before it.

        Also returns whether the target's own process was killed for no known reason.
        """
        target = self._target
        assert target is not None, "a job whose target refused has no trials"
        measured: list[ComponentMeasurement] = []
        whole_model: WholeModelMeasurement | None = None
        current: Component | None = None
        outcome, reason, target_killed = Outcome.OK, None, False
        try:
            self._instruments.join(self._select_ranks(task))
            self._check_execution(task.candidate, request)
            if task.kind is TrialKind.WHOLE_MODEL:
                run = partial(self._run_whole_model, target, task, request, clock)
                whole_model = self._instruments.within_memory(run)
            for component in task.components if task.kind is TrialKind.COMPONENTS else ():
                current = component
                self._send(ComponentStarted(component=component))
                measure = partial(self._measure, target, task, component, request, clock)
                measured.append(self._instruments.within_memory(measure))
                self._send(ComponentMeasured(measurement=measured[-1]))
                current = None
        except Exception as error:  # noqa: BLE001 - whatever a candidate's kernels raise is the trial's outcome
            outcome, reason = classify(error)
            target_killed = isinstance(error, TargetKilledError)
        measurement = Measurement(
            candidate=task.candidate,
            outcome=outcome,
            reason=reason,
            components=tuple(measured),
            failed_component=current,
            whole_model=whole_model,
        )
        return measurement, target_killed

    def _run_whole_model(
        self, target: ProfiledTarget | WholeTarget, task: TrialTask, request: ExplorationRequest, clock: PhaseClock
    ) -> WholeModelMeasurement:
        assert not isinstance(target, WholeTarget), "each of its trials measures the whole"
        target.check(task.candidate, task.model)
        if (extension := extension_for(task)) is not None:
            return extension.run_whole_model(self._instruments, task, request, clock)
        sharded = request.sharded(task.candidate.sharding)
        return run_whole_model(self._instruments, target, task.model, task.candidate, sharded, clock)

    def _is_lost(self, measurement: Measurement) -> bool:
        """Return whether the trial's failure leaves the device, or the group of ranks, unusable."""
        if measurement.outcome is Outcome.OK:
            return False
        failed = measurement.failed_component
        failed_alone = measurement.outcome is Outcome.OUT_OF_MEMORY and failed is not None and not failed.is_joint
        if self._instruments.rank_group.size > 1 and not failed_alone:
            # Do not query the device: it may be in the middle of an operation with other ranks, and never answer.
            return measurement.outcome is not Outcome.UNSUPPORTED
        return is_poisoned(self._instruments.device)

    def _measure(
        self,
        target: ProfiledTarget | WholeTarget,
        task: TrialTask,
        component: Component,
        request: ExplorationRequest,
        clock: PhaseClock,
    ) -> ComponentMeasurement:
        if isinstance(target, WholeTarget):
            return target.measure_component(component, task.candidate, clock)
        request, model = request.sharded(component.sharding), task.model
        extension = extension_for(component)
        if extension is not None and isinstance(model, ModelSpec):
            model, request = extension.shard_of(component, model, request)
        if component.kind is ComponentKind.OPTIMIZER:
            return measure_optimizer(self._instruments, target, model, component, task.candidate, request, clock)
        if component.kind is ComponentKind.EXCHANGE:
            assert extension is not None, "exchanges are those of an extension"
            return extension.measure_exchange(self._instruments, component, request.seed, clock)
        if component.kind is ComponentKind.COMMUNICATION:
            return measure_data_parallel_communication(self._instruments, target, model, component, request, clock)
        return measure_component(self._instruments, target, model, component, request, clock)

    def _check_execution(self, candidate: Candidate, request: ExplorationRequest) -> None:
        compiled = request.execution_of(candidate).compiles
        if compiled and (reason := missing_compiler(self._instruments.device.type)) is not None:
            raise UnsupportedTrialError(reason)
