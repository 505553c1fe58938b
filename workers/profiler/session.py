"""Answers the parent's orders, one after another."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bexp.kernels.attention import attention_backend
from bexp.kernels.experts.registry import expert_backend
from explorer.cost_model.components import Component, ComponentKind
from explorer.cost_model.step import memory_limit
from explorer.records.measurement import ComponentMeasurement, Measurement, Outcome, WholeModelMeasurement
from explorer.records.trial import TrialKind, TrialPlan
from explorer.spec.base import Frozen
from explorer.spec.candidate import Candidate
from explorer.spec.model import ModelSpec
from explorer.spec.request import ExplorationRequest
from workers.process.protocol import (
    Begin,
    ComponentMeasured,
    ComponentStarted,
    HardwareReply,
    MeasureHardware,
    Order,
    ReportReply,
    RunTrial,
    TrialFinished,
)
from workers.profiler.compilation import missing_compiler
from workers.profiler.failures import UnsupportedTrialError, classify, is_poisoned
from workers.profiler.hardware import measure_hardware
from workers.profiler.instruments import Instruments
from workers.profiler.phases import PhaseClock
from workers.profiler.rank_group import RankGroup, alone
from workers.profiler.report import report_device
from workers.profiler.trials.communication import measure_communication
from workers.profiler.trials.component import measure_block
from workers.profiler.trials.optimizer import measure_optimizer
from workers.profiler.trials.whole_model import run_whole_model
from workers.targets.reference.shapes import attention_shape, experts_shape

CALM_SECONDS = 5.0
"""How long a trial waits, at most, for a device to calm down on which the one before was disturbed."""


class Session:
    """The state of a profiler process: its instruments and the job it works on."""

    def __init__(
        self,
        instruments: Instruments,
        used_before: int | None,
        send: Callable[[Frozen], None],
        ranks: Callable[[TrialPlan], RankGroup] = alone,
    ) -> None:
        self._instruments = instruments
        self._used_before = used_before
        self._send = send
        self._ranks = ranks
        self._request: ExplorationRequest | None = None
        self._disturbed = False  # the last trial was
        self._reasons: dict[tuple[ComponentKind, str, ModelSpec], str | None] = {}

    def answer(self, order: Order) -> bool:
        """Do what is ordered; returns False when this process is not fit for another order."""
        if isinstance(order, MeasureHardware):
            self._send(HardwareReply(hardware=measure_hardware(self._instruments.device, self._used_before)))
        elif isinstance(order, Begin):
            self._begin(order)
        elif isinstance(order, RunTrial):
            return self._run_trial(order.plan)
        return True

    def _begin(self, order: Begin) -> None:
        request, hardware = order.request, order.hardware
        self._request = request
        self._reasons.clear()
        report = report_device(request.model, hardware, self._instruments.device)
        self._instruments.settle(release=True)
        self._instruments.limit_memory(memory_limit(request, hardware), hardware.context_bytes)
        others_bytes = self._instruments.monitor.begin(order.others_bytes)
        self._disturbed = False
        self._send(ReportReply(report=report, others_bytes=others_bytes))

    def _run_trial(self, plan: TrialPlan) -> bool:
        assert self._request is not None, "a job has begun"
        clock = PhaseClock()
        model = plan.model
        assert isinstance(model, ModelSpec), "reference layers are built of a specification"
        measured: list[ComponentMeasurement] = []
        whole_model: WholeModelMeasurement | None = None
        failed: Component | None = None
        outcome, reason = Outcome.OK, None
        if self._disturbed:
            self._instruments.monitor.wait_until_calm(CALM_SECONDS)
        try:
            self._instruments.join(self._ranks(plan))
            self._check_execution(self._request)
            if plan.kind is TrialKind.WHOLE_MODEL:
                self._check_backends(model, plan.candidate)
                whole_model = run_whole_model(
                    self._instruments, model, plan.candidate, self._request.sharded(plan.candidate.sharding), clock
                )
            for component in plan.components if plan.kind is TrialKind.COMPONENTS else ():
                failed = component
                self._send(ComponentStarted(component=component))
                measured.append(self._measure(model, plan.candidate, component, self._request, clock))
                self._send(ComponentMeasured(measurement=measured[-1]))
                failed = None
        except Exception as error:  # noqa: BLE001 - whatever a candidate's kernels raise is the trial's outcome
            outcome, reason = classify(error)
        poisoned = outcome is not Outcome.OK
        by_itself = outcome is Outcome.OUT_OF_MEMORY and failed is not None and not failed.is_joint
        if poisoned and self._instruments.ranks.size > 1 and not by_itself:
            # Not a word to the device: if it is in the middle of an operation with the others, this process would hang.
            poisoned = outcome is not Outcome.UNSUPPORTED
        elif poisoned:
            poisoned = is_poisoned(self._instruments.device)
        if not poisoned:
            exhausted = outcome is Outcome.OUT_OF_MEMORY or plan.kind is TrialKind.WHOLE_MODEL
            poisoned = self._instruments.settle(release=exhausted) > 0
        measurement = Measurement(
            candidate=plan.candidate,
            outcome=outcome,
            reason=reason,
            components=tuple(measured),
            failed_component=failed,
            whole_model=whole_model,
            phases=clock.seconds(),
        )
        self._disturbed = measurement.contamination is not None
        self._send(TrialFinished(measurement=measurement, seconds=clock.elapsed_seconds, poisoned=poisoned))
        return not poisoned

    def _measure(
        self,
        model: ModelSpec,
        candidate: Candidate,
        component: Component,
        request: ExplorationRequest,
        clock: PhaseClock,
    ) -> ComponentMeasurement:
        request = request.sharded(component.sharding)
        if component.kind is ComponentKind.OPTIMIZER:
            return measure_optimizer(self._instruments, model, component, candidate, request, clock)
        if component.kind is ComponentKind.COMMUNICATION:
            return measure_communication(self._instruments, model, component, request, clock)
        if component.backend is not None:
            self._check_backend(component.kind, component.backend, model)
        return measure_block(self._instruments, model, component, request, clock)

    def _check_execution(self, request: ExplorationRequest) -> None:
        if request.execution == "compile" and (reason := missing_compiler(self._instruments.device.type)) is not None:
            raise UnsupportedTrialError(reason)

    def _check_backends(self, model: ModelSpec, candidate: Candidate) -> None:
        self._check_backend(ComponentKind.ATTENTION, candidate.attention_backend, model)
        if candidate.expert_backend is not None:
            self._check_backend(ComponentKind.MOE_FFN, candidate.expert_backend, model)

    def _check_backend(self, kind: ComponentKind, name: str, model: ModelSpec) -> None:
        key = (kind, name, model)
        if key not in self._reasons:
            self._reasons[key] = self._unsupported_reason(kind, name, model, self._instruments.device)
        if (reason := self._reasons[key]) is not None:
            raise UnsupportedTrialError(reason)

    @staticmethod
    def _unsupported_reason(kind: ComponentKind, name: str, model: ModelSpec, device: torch.device) -> str | None:
        try:
            if kind is ComponentKind.ATTENTION:
                return attention_backend(name).unsupported_reason(attention_shape(model), device)
            shape, backend = experts_shape(model), expert_backend(name)
        except ValueError as error:
            return str(error)
        return "the model has no experts" if shape is None else backend.unsupported_reason(shape, device)
