"""A run of a training step under a deadline, and how it ended."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from bexp.explorer.records.measurement import Outcome
from bexp.measure.step_checks import StepError, is_finite
from bexp.out_of_memory import is_out_of_memory


@dataclass(frozen=True)
class Failure:
    """The reason why a size has no result."""

    outcome: Outcome
    reason: str


class _DeadlineError(BaseException):
    """Raised inside a step. It is a BaseException, so an `except Exception` in the step does not catch it."""


def attempt(run: Callable[[], Any], deadline_seconds: float) -> Failure | None:
    """Call `run`; return why it failed, or None if it did not.

    A tensor or float that `run` returns must be finite. The deadline works only in the main thread, and only if the
    step returns to Python now and then. A timer that the caller has set (`signal.setitimer`, `signal.alarm`) goes on
    afterwards with the time that is left; without any, it goes off at once.
    """
    try:
        with _deadline(deadline_seconds):
            if not is_finite(run()):
                return Failure(Outcome.CRASHED, "the loss is not finite")
    except _DeadlineError:
        return Failure(Outcome.TIMED_OUT, f"the step took longer than {deadline_seconds:g} s")
    except StepError as error:
        return Failure(Outcome.CRASHED, str(error))
    except Exception as error:  # noqa: BLE001 - the step is the caller's, and any failure of it is an outcome
        return Failure(Outcome.OUT_OF_MEMORY if is_out_of_memory(error) else Outcome.CRASHED, _first_line(error))
    return None


def release(device: torch.device) -> None:
    """Free the memory that a failed step left behind."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def expired(_signal: int, _frame: FrameType | None) -> None:
        raise _DeadlineError

    begun = time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, 0)
    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left > 0:  # zero would switch the caller's timer off
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - begun), 1e-6), interval)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
