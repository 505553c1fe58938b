"""The first optimizer steps of a command that runs with an answer, compared with the promise.

The module is loaded while torch itself is, so it imports nothing of torch before the first optimizer step.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from bexp.tune.link import BRACES, PROMISE, SIZE, STEPS

WARM_UP = 2
"""Optimizer steps that are not timed: they meet new shapes, and the optimizer's state."""
FEWEST, MOST, LONGEST_SECONDS = 3, 10, 60.0
"""Steps are timed until there are MOST of them, or after so long FEWEST."""
OTHER_WORK = 3.0
"""A step that takes this many times the median has saved or evaluated as well, and does not count."""

takers: list[Callable[[int], None]] = []
"""One for each part of the command that has taken the answer's size.

Each gets the number of micro-steps of the first step that was seen whole, and raises if it is wrong.
"""


def size_in_braces() -> int | None:
    """Return the size that stands in the command in place of its braces; None if it has no braces for one."""
    has_braces = json.loads(os.environ[PROMISE]).get("has_braces") if PROMISE in os.environ else BRACES in os.environ
    return int(os.environ[SIZE]) if has_braces else None


class CannotApplyError(RuntimeError):
    """The command does not train as the answer needs it."""


def patch(module: ModuleType) -> None:
    """Follow the optimizer of this process."""
    module.register_optimizer_step_post_hook(_steps.end_step)


def begin_again() -> None:
    """Leave the work since the last step, such as saving, out of the next one."""
    _steps.begin_again()


class _Steps:
    """The steps of the first optimizer that steps: their seconds and their micro-steps."""

    def __init__(self) -> None:
        self._first: Any = None
        self._began = 0.0
        self._num_micro_steps = 0
        self._steps: list[tuple[float, int]] = []
        self._is_over = False
        self.is_scaled = False  # a gradient scaler, which leaves out the optimizer's step where gradients overflow

    def end_step(self, optimizer: Any, *_: Any) -> None:
        """End a step, because an optimizer has stepped."""
        if self._is_over:
            return
        if self._first is None:
            self._first = optimizer
            self._is_over = not _is_first_process()
            if not self._is_over:
                self._count_micro_steps()
        elif optimizer is self._first:
            self._steps.append((now() - self._began, self._num_micro_steps))
            promise = json.loads(os.environ[PROMISE])
            if len(self._steps) == 1:
                _check(self._num_micro_steps, has_size=promise["has_size"])
            timed = self._steps[WARM_UP - 1 :]
            if len(timed) >= MOST or (len(timed) >= FEWEST and sum(s for s, _ in timed) > LONGEST_SECONDS):
                self._is_over = True
                say_kept(timed, int(os.environ[SIZE]), promise["tokens_per_second"], promise["tokens_per_sample"])
        self._num_micro_steps = 0
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        if not self._is_over:
            self._began = now()

    def begin_again(self) -> None:
        """Begin a step anew, unless it has micro-steps already."""
        if self._num_micro_steps == 0:
            self.begin()

    def _count_micro_steps(self) -> None:
        import torch  # noqa: PLC0415 - it is complete by now

        backward = torch.Tensor.backward

        @functools.wraps(backward)
        def counted(*given: Any, **named: Any) -> Any:
            self._num_micro_steps += 1
            return backward(*given, **named)  # type: ignore[no-untyped-call]  # torch has no types for it

        torch.Tensor.backward = counted  # type: ignore[method-assign]  # the loop calls it by this name
        step = torch.amp.GradScaler.step

        @functools.wraps(step)
        def noted(scaler: torch.amp.GradScaler, *given: Any, **named: Any) -> Any:
            self.is_scaled = self.is_scaled or scaler.is_enabled()
            return step(scaler, *given, **named)

        torch.amp.GradScaler.step = noted  # type: ignore[method-assign, assignment]  # as above


_steps = _Steps()


def _check(num_micro_steps: int, *, has_size: bool) -> None:
    """Raise if the command trains without the answer. `has_size` says whether its size stands in the command."""
    if not takers and not has_size:
        raise CannotApplyError("nothing in this command has taken the size: put {micro_batch_size} where it takes it")
    if not takers and STEPS in os.environ:
        check_steps(num_micro_steps)
    for taker in takers:
        taker(num_micro_steps)


def check_steps(num_micro_steps: int) -> None:
    """Raise if an optimizer step has another number of micro-steps than the answer, so that the batch is another."""
    needed = int(os.environ.get(STEPS) or 1)
    if num_micro_steps != needed and not (_steps.is_scaled and num_micro_steps % needed == 0):
        raise CannotApplyError(
            f"the answer needs {needed} accumulation steps, but this loop has {num_micro_steps} micro-batches in a "
            "step of its optimizer, or calls backward as often: set its size and its accumulation in the command or in "
            "the script"
        )


def say_kept(steps: Sequence[tuple[float, int]], size: int, tokens_per_second: float, tokens_per_sample: int) -> None:
    """Print in one line how the seconds and micro-steps of a few steps compare with the promise."""
    usual = OTHER_WORK * statistics.median(seconds for seconds, _ in steps)
    steps = [step for step in steps if step[0] <= usual]
    seconds = [each for each, _ in steps]
    rate = tokens_per_sample * size * sum(number for _, number in steps) / sum(seconds)
    kept = rate / tokens_per_second
    error = kept * statistics.stdev(seconds) / statistics.fmean(seconds) / len(seconds) ** 0.5 if steps[1:] else 0.0
    unit = "tokens/s" if tokens_per_sample > 1 else "samples/s"
    sys.stderr.write(  # a bar of progress may stand in the line above
        f"\nbexp: {len(steps)} optimizer steps ran at {rate:,.0f} {unit}, {kept:.2f} +- {error:.2f} of the "
        f"{tokens_per_second:,.0f} that were promised\n"
    )
    sys.stderr.flush()


def _is_first_process() -> bool:
    import torch.distributed as dist  # noqa: PLC0415 - torch is complete by now

    return not dist.is_initialized() or dist.get_rank() == 0


def now() -> float:
    """Return the time when the GPU, if one is in use, has finished its work."""
    import torch  # noqa: PLC0415 - it is complete by now

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
