"""The best micro-batch size for any training step, measured in the training process itself.

Each size starts from the same state, whatever the earlier ones did. Afterwards the gradients, the buffers and the
random state are as they were before. The search (`bexp.explorer`) chooses what is measured.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from bexp.allocator import current_allocator
from bexp.client.progress import is_watched, numbered_printer
from bexp.explorer.model.spelling import shortened
from bexp.explorer.records.event import EventCode, EventDraft
from bexp.explorer.records.measurement import Outcome, SizeResult
from bexp.explorer.search.step_exploration import SizesError, StepAnswer, StepDescription, search_step
from bexp.measure.left_alone import left_alone
from bexp.step.agreement import Alone, BrokenGroupError, Together, num_processes, release
from bexp.step.results import StepRecommendation, describe_result
from bexp.step.training_step import OptimizerState, TrainingStep

_LOGGER = logging.getLogger(__name__)
SCATTERED = 0.15
"""Relative standard deviation between measurements of one size, from which on a note says that timings scattered."""
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def explore(
    *,
    step: Callable[[Any], Any],
    batch: Callable[[int], Any],
    sizes: Iterable[int] = SIZES,
    parameters: nn.Module | Iterable[nn.Parameter] = (),
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    effective_batch_size: int | None = None,
    no_sync: Callable[[], AbstractContextManager[Any]] | None = None,
    repeats: int = 5,
    deadline_seconds: float = 60.0,
    max_seconds: float = 300.0,
    progress: bool | None = None,
) -> StepRecommendation:
    """Measure a step at several sizes and recommend the best one.

    The search chooses the sizes to measure, and computes the confidence. If measurements scatter, the confidence is
    low, and a note says so. If the search fails, all sizes are measured in ascending order until one runs out of
    memory. The fastest is then recommended without a confidence, and a note says why.

    A step may run out of memory, fail, leave no gradients, return a loss that is not finite, or take too long. That is
    the outcome of its size, and so is a batch that has not m sequences.

    Several processes must all call this with the same arguments. They get the same answer, because the outcome of one
    counts for all. If a process fails in the middle of an exchange, the others are back after `deadline_seconds` at the
    latest. The exploration then ends with what is known, and `group_is_usable` is false.

    Args:
        step: runs forward and backward of a micro-batch, and may return the loss.
        batch: makes a micro-batch of m sequences, as `batch(m)`.
        sizes: the sizes to try. The search takes those up to 256, and at most 64 of them.
        parameters: those that are trained, or their module. Gradients are saved and restored, and a module's buffers.
        optimizer: makes an optimizer of the parameters, like the one used in training. It takes steps of size zero
            here, and its state is discarded.
        effective_batch_size: sequences in a whole step over all processes. Only sizes that divide a process's share of
            it are tried, and the optimizer's time is spread over the micro-batches.
        no_sync: DDP's `model.no_sync`. Each size runs within it first, so that a process that runs out of memory alone
            does so while nobody waits for its gradients.
        repeats: timed steps of a measurement.
        deadline_seconds: the longest that the first step of a size may take, and all timed ones together.
        max_seconds: nothing new is started after them.
        progress: whether the first process prints a line on stderr for each event, as `bexp explore` does. Default: in
            a notebook, or if stderr is a terminal.

    Raises:
        ValueError: no size is left to try.
        BrokenGroupError: the first process has ended.
    """
    asked = _sizes(sizes, effective_batch_size)
    trained = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
    buffers = list(parameters.buffers()) if isinstance(parameters, nn.Module) else []
    measured = TrainingStep(step, batch, no_sync, trained, _device(trained), repeats, deadline_seconds)
    processes = Together(deadline_seconds) if num_processes() > 1 else Alone()
    devices = range(torch.cuda.device_count()) if measured.device.type == "cuda" else ()
    try:
        with left_alone(trained, buffers, (torch.device("cuda", number) for number in devices)):
            measured.clear()
            state = OptimizerState.open(optimizer, measured, processes)
            tell = numbered_printer() if (is_watched() if progress is None else progress) else _say_nothing
            exploration = _Exploration(measured, processes, asked, state, effective_batch_size, max_seconds, tell)
            return exploration.run()
    finally:
        release(measured.device)
        processes.close()


class _Exploration:
    """The exploration of one step. The first process decides what is measured, and all of them measure it."""

    def __init__(
        self,
        step: TrainingStep,
        processes: Alone | Together,
        sizes: tuple[int, ...],
        state: OptimizerState,
        effective_batch_size: int | None,
        max_seconds: float,
        tell: Callable[[EventDraft], None],
    ) -> None:
        self._step = step
        self._tell = tell
        self._processes = processes
        self._sizes = sizes
        self._state = state
        self._batch_size = effective_batch_size
        self._share = _share(effective_batch_size)
        self._num_processes = num_processes()  # an aborted group has none
        self._max_seconds = max_seconds
        self._end = time.monotonic() + max_seconds
        self._results: list[SizeResult] = []
        self._notes = [] if state.note is None else [state.note]
        self._held_bytes = torch.cuda.memory_allocated(step.device) if step.device.type == "cuda" else 0

    def run(self) -> StepRecommendation:
        """Measure what is decided on, until the search, the time or the process group is at its end."""
        answer = StepAnswer()
        if self._processes.is_leader:
            answer = self._lead()
            if time.monotonic() >= self._end:
                self._notes.append(f"the {self._max_seconds:g} s were used up")
            self._processes.share(None)
        else:
            while (size := self._processes.share(None)) is not None:
                self._measure(size)
        fields, self._notes = self._processes.share([asdict(answer), self._notes])
        return self._recommend(StepAnswer(**fields))

    def _lead(self) -> StepAnswer:
        """Decide what all processes measure, and return what the search says of it; nothing if it fails."""
        first = self._decide(self._sizes[0])
        if first.outcome is Outcome.OUT_OF_MEMORY:
            return StepAnswer()
        try:
            return search_step(self._describe(first), self._decide_in_time, self._tell_recommendation)
        except BrokenGroupError:
            raise
        except Exception as error:  # other processes wait, and plain measurements need no search
            if not isinstance(error, SizesError):
                _LOGGER.warning("the search failed", exc_info=True)
            reason = shortened(" ".join(f"{type(error).__name__}: {error}".split()), 300)
            self._notes.append(
                f"the search failed ({reason}): sizes were measured in ascending order, the fastest is recommended, "
                "and no confidence is stated"
            )
        while (left := _sizes_left(self._sizes, self._results)) and not self._is_over():
            self._decide(left[0])
        return StepAnswer()

    def _tell_recommendation(self, event: EventDraft) -> None:
        """Tell what is recommended; the other events of the search speak of a model's parts."""
        if event.code is EventCode.RECOMMENDATION:
            self._tell(event)

    def _decide_in_time(self, size: int) -> SizeResult | None:
        return None if self._is_over() else self._decide(size)

    def _decide(self, size: int) -> SizeResult:
        self._processes.share(size)
        result = self._measure(size)
        ok, message = result.outcome is Outcome.OK, f"micro_batch_size={size}: {describe_result(result)}"
        self._tell(EventDraft(code=EventCode.TRIAL if ok else EventCode.INFEASIBLE, message=message))
        return result

    def _measure(self, size: int) -> SizeResult:
        self._results.append(self._step.measure(size, self._processes))
        return self._results[-1]

    def _is_over(self) -> bool:
        """Return whether nothing more may be measured."""
        return not self._processes.group_is_usable or time.monotonic() >= self._end

    def _describe(self, first: SizeResult) -> StepDescription:
        device, trained = self._step.device, self._step.trained
        on_cuda = device.type == "cuda"
        free, total = torch.cuda.mem_get_info(device) if on_cuda else (0, 0)
        return StepDescription(
            device_kind="cpu" if device.type == "cpu" else "cuda",
            device_name=torch.cuda.get_device_name(device) if on_cuda else device.type,
            memory_bytes=total,
            context_bytes=max(0, total - free - torch.cuda.memory_reserved(device)) if on_cuda else 0,
            held_bytes=self._held_bytes,
            gradient_bytes=sum(parameter.nbytes for parameter in trained),
            num_parameters=max(1, sum(parameter.numel() for parameter in trained)),
            torch_version=str(torch.__version__),
            sizes=self._sizes,
            sequences=self._share,
            optimizer_seconds=self._state.seconds,
            max_seconds=self._max_seconds,
            first=first,
        )

    def _recommend(self, answer: StepAnswer) -> StepRecommendation:
        notes = [*self._notes]
        if not self._processes.group_is_usable:
            notes.append(
                "a process failed in the middle of an exchange: make the process group again, or start the processes "
                "again, before training"
            )
        if out := answer.predicted_out:
            notes.append(f"not tried, because they are expected not to fit: {', '.join(map(str, out))}")
        if (scatter := answer.scatter or 0.0) >= SCATTERED:
            notes.append(
                f"timings scattered: two measurements of one size differ by about {2**0.5 * scatter:.0%}. Something "
                "else uses the device, or the step varies; on a quiet device the confidence is higher"
            )
        best = answer.micro_batch_size or self._fastest()
        if best is None:
            last = self._results[-1]
            fits = last.outcome is not Outcome.OUT_OF_MEMORY
            notes.append(f"no size could be measured: {last.reason}" if fits else "no size fits")
        peaks = [r.peak_bytes for r in self._results if r.micro_batch_size == best and r.peak_bytes is not None]
        return StepRecommendation(
            micro_batch_size=best,
            grad_accum_steps=self._share // best if self._share and best else None,
            sequences_per_second=answer.sequences_per_second or (None if best is None else self._rate(best)),
            confidence=answer.confidence,
            optimizer_seconds=self._state.seconds,
            results=tuple(self._results),
            notes=tuple(notes),
            peak_bytes=max(peaks, default=None),
            effective_batch_size=self._batch_size,
            num_devices=self._num_processes,
            allocator=current_allocator(),
            group_is_usable=self._processes.group_is_usable,
        )

    def _fastest(self) -> int | None:
        """The size with the most sequences a second, among those that never failed."""
        failed = {result.micro_batch_size for result in self._results if result.outcome is not Outcome.OK}
        fit = {result.micro_batch_size for result in self._results} - failed
        return max(sorted(fit), key=self._rate, default=None)

    def _rate(self, size: int) -> float:
        """Sequences a second of a whole step, by all measurements of a size."""
        seconds = [r.mean_seconds for r in self._results if r.micro_batch_size == size and r.outcome is Outcome.OK]
        overhead = self._state.seconds * size / self._share if self._share else 0.0
        return size / (sum(seconds) / len(seconds) + overhead)


def _say_nothing(_: EventDraft) -> None:
    """Take an event that nobody watches."""


def _sizes(sizes: Iterable[int], effective_batch_size: int | None) -> tuple[int, ...]:
    share = _share(effective_batch_size)
    usable = tuple(sorted({size for size in sizes if size > 0 and (share is None or share % size == 0)}))
    if not usable:
        raise ValueError(
            "there is no micro-batch size to try"
            if share is None
            else f"no micro-batch size divides the {share} sequences that each process has in a step"
        )
    return usable


def _sizes_left(sizes: Sequence[int], results: Sequence[SizeResult]) -> list[int]:
    """Return the sizes that were not tried yet and are below all that ran out of memory, in ascending order."""
    tried = {result.micro_batch_size for result in results}
    limit = min((r.micro_batch_size for r in results if r.outcome is Outcome.OUT_OF_MEMORY), default=None)
    return [size for size in sizes if size not in tried and (limit is None or size < limit)]


def _share(effective_batch_size: int | None) -> int | None:
    """Return the number of sequences that each process has in a whole step."""
    if effective_batch_size is None:
        return None
    if effective_batch_size % num_processes():
        raise ValueError(f"{effective_batch_size} sequences cannot be shared by {num_processes()} processes")
    return effective_batch_size // num_processes()


def _device(trained: Sequence[nn.Parameter]) -> torch.device:
    if trained:
        return trained[0].device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
