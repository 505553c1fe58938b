"""The seconds of a training's own steps, and their peak, in each of its processes."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from bexp.explorer.search.host_pace import BUSY
from bexp.tune.compilation import new_seconds
from bexp.tune.peak import peak_bytes, reset_peak
from bexp.tune.ranks import Ranks, spread
from bexp.tune.spans import FEWEST_SPANS, pace_without_stalls, span_paces, standard_error

if TYPE_CHECKING:
    from bexp.measure.nvml import Gpu
    from bexp.tune.micro_batches import MicroBatches


@dataclass(frozen=True)
class MicroStep:
    """A micro-step, with its micro-batch as far as that is known."""

    seconds: float
    is_timed: bool
    number: int | None = None
    """Of the micro-batch."""
    positions: int | None = None
    """Tokens that were computed, padding included."""
    is_first: bool = False
    """The first of its width, in this process or in another one for which this one waits. It is not timed."""
    compile_seconds: float = 0.0
    """Of torch.compile, which `seconds` leave out."""


ACCUMULATION = 2
"""Micro-steps of a measured step, or 1 if the size has no more. More of them would show nothing new.

With one, no gradients are in memory during the forward pass, if the loop frees them after each optimizer step.
"""
WARM_UP_SECONDS = 0.5
"""Timing begins after so long, and after the optimizer steps that have the longest micro-batch."""
FEWEST_STEPS, MOST_STEPS = 3, 60
LEAST_SECONDS, MOST_SECONDS = 1.5, 30.0
"""Steps are timed for so long at least, until there are enough of them, and for so long at most."""
FEWEST_VARIED = 13
"""The least micro-steps that are timed if their micro-batches differ in length by more than ALIKE."""
ALIKE = 1.02
SETTLED, SETTLING_SECONDS, UNSETTLED_SECONDS = 1.06, 15.0, 45.0
"""Timing begins anew while the first half of the micro-steps is slower than the second by this factor: for the first of
these times at most, or for the second if the device waits for the host.

On a GPU the first micro-batches of each length load kernels, ask for their algorithms and grow the allocator's cache.
"""
PRECISE, PRECISE_SECONDS = 0.04, 6.0
"""Where lengths are not known, steps are timed until the standard error is this share of the mean, or for so long.

Where the device waits for the host, whose pace varies for seconds, they are always timed for so long.
"""
UNSTEADY_SECONDS = 15.0
"""Where the device waits for the host, and spans differ so much that their mean is not PRECISE: for so long."""
FEWEST_OTHERS, MOST_MORE_STEPS = 2, 4
"""Before timing, so many micro-steps run with others than the longest micro-batch, within so many more steps."""
LONG_SECONDS = 2.0
"""A micro-step of this length is timed also if its width is new, because a new width adds little to it.

Where all samples are alike, one such optimizer step is enough. It may be the second: it meets the optimizer's state.
"""


class Clock:
    """A clock of the micro-steps and the optimizer steps of one size, and their peak; the first steps do not count."""

    def __init__(self, device: torch.device, ranks: Ranks, warm_up_steps: int) -> None:
        self._device = torch.device(device)
        self._ranks = ranks
        self._first: float | None = None
        self._warm_up_steps = warm_up_steps
        self._num_steps = 0
        self._gpu = _gpu_of(self._device)
        self._began: float | None = None
        self._began_at = 0.0  # of time.time()
        self._ended = 0.0
        self._micro_steps: list[MicroStep] = []
        self._met: set[object] = set()
        self._optimizer_steps: list[float] = []
        self._step_ends: list[int] = []  # the number of micro-steps at the end of each optimizer step
        self.is_over = False
        self.micro_batches: MicroBatches | None = None
        """Those of the steps, if they vary in length and are known."""
        self.ran_longest = False
        """Whether the longest micro-batch was run; the trial reports it."""
        self.are_alike = True
        """False if samples vary in length."""
        self.forgets_first_peak = False
        """Whether the peak counts only from the second step on."""
        self.accumulation_given: int | None = None
        """The loop's own accumulation steps as the trial has set them."""
        reset_peak(self._device)

    def begin_micro_step(self) -> None:
        """Begin the first micro-step. Later ones begin where the last ended, so that they include waiting for data."""
        if self._first is None:
            self._first = self._ended = self._now()

    def end_micro_step(self, number: int | None = None, positions: int | None = None) -> None:
        """End the micro-step of the micro-batch with this number, which has so many positions."""
        now = self._now()
        self.note(now - self._ended, number, positions)
        self._ended = now

    def note(self, seconds: float, number: int | None, positions: int | None) -> None:
        """Note a micro-step, which may have ended before this clock began. Its seconds count without compilations.

        Adversarial training and optimizers with a closure call backward several times for a micro-batch: that is one.
        """
        compiled = new_seconds()
        seconds, is_first = max(0.0, seconds - compiled), False
        if (last := self._same_micro_batch(number)) is not None:
            compiled += last.compile_seconds
            self._micro_steps[-1] = replace(last, seconds=last.seconds + seconds, compile_seconds=compiled)
            return
        if self.micro_batches is not None and number is not None and positions is not None:
            widths = {positions, *self.micro_batches.widths_of_others(number)}
            is_first = not widths <= self._met and seconds < LONG_SECONDS
            self._met |= widths
        self._micro_steps.append(
            MicroStep(seconds, self._began is not None and not is_first, number, positions, is_first, compiled)
        )

    def _same_micro_batch(self, number: int | None) -> MicroStep | None:
        """Return the last micro-step if it is of the micro-batch with this number, in this optimizer step.

        A loop may draw all micro-batches of an optimizer step before the first backward. Then all have the number of
        the last one, and each call is of another.
        """
        end = self._step_ends[-1] if self._step_ends else 0
        begun = self._micro_steps[end:]
        if not begun or number is None or begun[-1].number != number:
            return None
        before = self._micro_steps[end - 1].number if end else -1
        drawn = number - (-1 if before is None else before)
        return begun[-1] if drawn <= len({each.number for each in begun}) else None

    def end_step(self) -> None:
        """End an optimizer step, after which the loop may be over."""
        now = self._now()
        self._optimizer_steps.append(now - self._ended)
        self._step_ends.append(len(self._micro_steps))
        self._ended = now
        self._num_steps += 1
        ran = 0.0 if self._first is None else now - self._first
        if self._num_steps == 1 and self.forgets_first_peak:
            reset_peak(self._device)
        is_long = self.are_alike and any(step.seconds >= LONG_SECONDS for step in self._micro_steps[-1:])
        warm_up_steps, fewest_steps = (1, 1) if is_long else (self._warm_up_steps, FEWEST_STEPS)
        warm = self._num_steps >= warm_up_steps and ran >= WARM_UP_SECONDS and self._has_met_others()
        elapsed = 0.0 if self._began is None else now - self._began
        number = 0 if self._began is None else len(self._optimizer_steps)
        enough = number >= fewest_steps and len(self._timed()) > 1 and elapsed >= LEAST_SECONDS
        if enough and len(self._timed()) < FEWEST_VARIED:
            enough = not self._varies()
        if self._waits_for_host():
            enough = enough and elapsed >= (PRECISE_SECONDS if self._is_steady() else UNSTEADY_SECONDS)
        else:
            enough = enough and (elapsed >= PRECISE_SECONDS or self._is_precise())
        is_spent = elapsed >= MOST_SECONDS or (number >= MOST_STEPS and (enough or not self._waits_for_host()))
        most = UNSETTLED_SECONDS if self._waits_for_host() else SETTLING_SECONDS
        restarts = enough and not is_spent and ran < most and not self._has_settled()
        over = is_spent or (enough and not restarts)
        agreed = self._ranks.share({"is_warm": warm, "restarts": restarts, "is_over": over})
        if agreed is None:
            return
        if agreed["restarts"] or (agreed["is_warm"] and self._began is None):  # all by the first process's word
            self._micro_steps = [replace(step, is_timed=False) for step in self._micro_steps]
            self._optimizer_steps.clear()
            self._began, self._began_at = now, time.time()
        self.is_over = agreed["is_over"]
        if self.is_over:
            self._drop_unsettled()
        self._ended = self._now()  # what the clock asks of the driver and of other processes is no part of a step

    def end_early(self) -> None:
        """Count every step after the first, because the loop has ended before it was warm."""
        self.is_over = True
        if not self.has_figures:
            after = self._step_ends[0] if self._step_ends else len(self._micro_steps)
            self._micro_steps = [
                replace(step, is_timed=place >= after and not step.is_first)
                for place, step in enumerate(self._micro_steps)
            ]

    @property
    def has_figures(self) -> bool:
        """Whether enough micro-steps were timed."""
        return len(self._timed()) > 1

    @property
    def accumulation(self) -> int | None:
        """The micro-batches of an optimizer step: the commonest number after the first step. None before the second."""
        steps = [self._micro_steps[begin:end] for begin, end in pairwise(self._step_ends)]
        counts = [
            len(micro_steps)
            if any(each.number is None for each in micro_steps)
            else len({each.number for each in micro_steps})
            for micro_steps in steps
        ]
        return statistics.mode(counts) if counts else None

    def figures(self) -> dict[str, Any]:
        """Return the figures for the trial, each of the slowest or the fullest process."""
        timed = self._timed()
        if not self.has_figures:
            raise RuntimeError("the training ended by itself before two micro-steps could be timed")
        number = len(timed)
        expected = None if self.micro_batches is None else self.micro_batches.expect(self._micro_steps)
        mean, error = statistics.fmean(timed), standard_error(timed)
        if expected is not None:
            mean, error = expected.seconds, expected.error
        all_mean = mean
        peak, reserved = peak_bytes(self._device)
        paces = span_paces(self._work() if expected is None else expected.timed)
        if len(paces) >= FEWEST_SPANS:
            error = max(error, mean * standard_error(paces))
            mean *= pace_without_stalls(paces)
        own: dict[str, float] = {
            "micro_step_seconds": mean,
            "optimizer_seconds": statistics.median(self._optimizer_steps or [0.0]),
            "standard_error_seconds": error,
            "peak_bytes": peak,
            "reserved_bytes": reserved,
        }
        busy = self._busy_share()
        each = self._ranks.gather(
            own
            | {"alone": statistics.quantiles(timed)[0], "accumulation": self.accumulation or 0}
            | {"busy": 1.0 if busy is None else busy}
        )
        counts = [int(figures["accumulation"]) for figures in each]
        if len(set(counts)) > 1:
            raise RuntimeError(f"the processes accumulate different numbers of micro-batches: {counts}")
        return {
            **{name: max(figures[name] for figures in each) for name in own},
            "repeats": number,
            "compile_seconds": [step.compile_seconds for step in self._micro_steps if step.compile_seconds],
            "busy_share": None if busy is None else min(figures["busy"] for figures in each),
            "span_seconds": (all_mean * min(paces), all_mean * max(paces)) if len(paces) >= FEWEST_SPANS else None,
            "new_width_seconds": expected and expected.new_width_seconds,
            "new_width_share": expected and expected.new_width_share,
            "num_shapes": len({step.positions for step in self._micro_steps if step.positions}) or None,
            "data": {
                "accumulation": self.accumulation,
                "accumulation_given": self.accumulation_given,
                "ran_longest": self.ran_longest,
                "tail": self.micro_batches.tail if expected is not None and self.micro_batches is not None else None,
                "processes": spread(each),
            },
        }

    def _work(self) -> list[tuple[float, float]]:
        """Return the seconds of each timed micro-step, and its positions as far as they are known."""
        return [(step.seconds, float(step.positions or 1)) for step in self._micro_steps if step.is_timed]

    def _is_steady(self) -> bool:
        """Return whether the spans' mean is known well enough."""
        paces = span_paces(self._work())
        return len(paces) >= FEWEST_SPANS and standard_error(paces) <= PRECISE

    def _timed(self) -> list[float]:
        return [step.seconds for step in self._micro_steps if step.is_timed]

    def _busy_share(self) -> float | None:
        return None if self._gpu is None or self._began is None else self._gpu.mean_busy_share(self._began_at)

    def _waits_for_host(self) -> bool:
        """Return whether the device waits for the host, as far as that is known."""
        share = self._busy_share()
        return share is not None and share < BUSY

    def _has_settled(self) -> bool:
        """Return whether micro-steps are no longer getting faster, for each position where these are known."""
        paces = [seconds / work for seconds, work in self._work()]
        half = len(paces) // 2
        return half < 2 or statistics.median(paces[:half]) <= SETTLED * statistics.median(paces[half:])

    def _drop_unsettled(self) -> None:
        """Have the earlier half no longer count while micro-steps got faster to the end, as long as enough are left."""
        while not self._has_settled():
            places = [place for place, step in enumerate(self._micro_steps) if step.is_timed]
            early, late = places[: len(places) // 2], places[len(places) // 2 :]
            if sum(self._micro_steps[place].seconds for place in late) < LEAST_SECONDS:
                return
            for place in early:
                self._micro_steps[place] = replace(self._micro_steps[place], is_timed=False)

    def _is_precise(self) -> bool:
        """Return whether the mean is known well enough. A fit judges the mean of known micro-batches instead."""
        timed = self._timed()
        return self.micro_batches is not None or standard_error(timed) <= PRECISE * statistics.fmean(timed)

    def _has_met_others(self) -> bool:
        """Return whether other micro-batches than the longest have run, so that no cost of new shapes is timed."""
        if self.micro_batches is None or self._num_steps >= self._warm_up_steps + MOST_MORE_STEPS:
            return True
        others = [step for step in self._micro_steps if not self.micro_batches.is_longest(step.number or 0)]
        return len(others) >= FEWEST_OTHERS

    def _varies(self) -> bool:
        """Return whether the micro-batches differ in length, as far as that can be seen."""
        seen = [step.positions for step in self._micro_steps if step.positions]
        return bool(seen) and max(seen) > ALIKE * min(seen)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _gpu_of(device: torch.device) -> Gpu | None:
    """Return a CUDA device as its driver sees it, if the driver answers."""
    if device.type != "cuda":
        return None
    from bexp.measure.nvml import Gpu  # noqa: PLC0415 - a CPU has no use for it

    return Gpu.open(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
