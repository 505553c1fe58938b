"""The training step that is measured in its own process, its optimizer's state, and what is as before afterwards."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bexp.explorer.records.measurement import Outcome, SizeResult
from bexp.measure.step_checks import BatchShapes, StepError, check_gradients
from bexp.step.agreement import GRACE_SECONDS, Alone, Failure, Together, attempt, release

WARM_UPS = 2


@dataclass(frozen=True)
class TrainingStep:
    """A training step, and how it is measured."""

    run: Callable[[Any], Any]
    """Runs forward and backward of a micro-batch."""
    batch: Callable[[int], Any]
    """Makes a micro-batch of so many sequences."""
    no_sync: Callable[[], AbstractContextManager[Any]] | None
    """Keeps a step from exchanging gradients; None if nothing does."""
    trained: Sequence[nn.Parameter]
    """The parameters that must get gradients."""
    device: torch.device
    """Where the parameters lie."""
    repeats: int
    """Timed steps of a measurement."""
    deadline_seconds: float
    """The longest that the first step of a size may take, and all timed ones together."""
    batch_shapes: BatchShapes = field(default_factory=BatchShapes)
    """The shapes of the micro-batches so far."""

    def measure(self, size: int, processes: Alone | Together) -> SizeResult:
        """Run the step at one size, first without an exchange of gradients if that is possible, then timed."""
        seconds: list[float] = []
        inputs: list[Any] = []

        def alone() -> Any:
            inputs.append(self.batch(size))
            self.batch_shapes.check(size, inputs[0])
            with (self.no_sync or contextlib.nullcontext)():
                loss = self.run(inputs[0])
                self._check_gradients(inputs[0])
            self.wait()
            return loss

        def timed() -> Any:
            loss = None
            for repeat in range(WARM_UPS + self.repeats):
                begun = time.perf_counter()
                loss = self.run(inputs[0])
                self.wait()
                if repeat >= WARM_UPS:
                    seconds.append(time.perf_counter() - begun)
            return loss

        on_cuda = self.device.type == "cuda"
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        failure: Failure | None = None
        figures: list[float] = []
        for run in (alone, timed):
            # Without an exchange a process waits for nobody: it may take as long as its deadline allows.
            exchanges = run is timed or self.no_sync is None
            with processes.guarded(GRACE_SECONDS if exchanges else self.deadline_seconds):
                own = attempt(run, self.deadline_seconds)
            peak = float(torch.cuda.max_memory_allocated(self.device)) if on_cuda else 0.0
            failure, figures = processes.agree(own, [peak, *seconds])
            if failure is not None:
                break
        inputs.clear()
        self.clear()
        if failure is not None:
            release(self.device)
            return SizeResult(size, failure.outcome, failure.reason)
        return SizeResult(size, Outcome.OK, None, tuple(figures[1:]), int(figures[0]) if on_cuda else None)

    def _check_gradients(self, batch: Any) -> None:
        try:
            check_gradients(self.trained, lambda: self.run(batch))
        except StepError as error:
            if self.no_sync is None:
                raise
            raise StepError(f"{error}. Under FSDP, leave out no_sync: it keeps gradients elsewhere") from error

    def clear(self) -> None:
        """Drop the gradients."""
        for parameter in self.trained:
            parameter.grad = None

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class OptimizerState:
    """The throwaway state of an optimizer, which only has to exist, and the seconds of one of its steps."""

    held: Any = None
    seconds: float = 0.0
    note: str | None = None

    @classmethod
    def open(
        cls,
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None,
        step: TrainingStep,
        processes: Alone | Together,
    ) -> OptimizerState:
        """Make an optimizer and have it take steps of size zero. If that fails, `note` says why."""
        if make is None or not step.trained:
            return cls()
        made: list[torch.optim.Optimizer] = []
        seconds = [0.0]

        def run() -> None:
            made.append(make(list(step.trained)))
            for group in made[0].param_groups:
                group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
            for parameter in step.trained:
                parameter.grad = torch.zeros_like(parameter)
            for _ in range(WARM_UPS + 1):
                begun = time.perf_counter()
                made[0].step()
                step.wait()
                seconds[0] = time.perf_counter() - begun

        with processes.guarded(GRACE_SECONDS):
            own = attempt(run, step.deadline_seconds)
        failure, figures = processes.agree(own, seconds)
        step.clear()
        if failure is not None:
            made.clear()
            release(step.device)
            return cls(note=f"the optimizer's state is left out: {failure.reason}")
        return cls(made, figures[0])
