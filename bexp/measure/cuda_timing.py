"""Timing of modules on a CUDA device with events, separate from the host that issues them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bexp.measure.passes import Passes
from bexp.measure.timing import (
    LocalReducer,
    PassSample,
    Reducer,
    Timing,
    TimingBudget,
    WaitingPasses,
    collector_paused,
    summarize,
)

MAX_QUEUED_LAUNCHES = 800
"""The driver blocks the host at about 1024 queued launches; a batch stays below that."""
FASTEST_LAUNCH_SECONDS = 2.5e-6
"""The least host seconds of one eager operation. Issue seconds divided by this bound the number of launches."""
SLEEP_MARGIN = 1.5
DEVICE_BOUND = 1.2
"""If the device takes this many times as long as the issue, the host stays ahead by itself."""
CLEARLY_AHEAD = 0.1
"""If the host takes at most this share of the device's time, a module neither waits for the device nor for the host."""
HEAT_SECONDS = 0.15
"""How long a module runs before it is timed: power limits act within a tenth of a second."""
CHAIN_LENGTHS = (16, 4)
"""How many times a module runs in a row when the host is timed: 16, or 4 if 16 do not fit the memory.

A layer alone takes the host about 1.5 times as long as one of 16 in a row. One of 4 in a row mostly takes 5 to 50%
longer. One of 16 agrees with the time that a further layer adds to a model (benchmarks/LOG.md).
"""
HOST_REPEATS = 5
LEAD_REPEATS = 9
WAITING_ROW = 8
"""Forwards in a row, if the host waits for the device in each of them."""
HOST_MATTERS = 0.6
"""If a module alone takes the host less than this share of the device's time, no row is timed.

The host could not limit such a module, and a row would cost about 100 times the device's time.
"""
ALONE_OVER_ROW = 1.5
"""Host seconds of a layer alone over those of one of 16 in a row, where no row is timed."""
BLOCKED_SHARE = 0.9
"""If the host takes this share of the device's sleep to issue a repeat, it was waiting for the device."""


@dataclass(frozen=True, slots=True)
class _Events:
    before_forward: torch.cuda.Event
    after_forward: torch.cuda.Event
    before_backward: torch.cuda.Event
    after_backward: torch.cuda.Event


class CudaTimer:
    """A timer of a module's passes, back to back.

    If a module keeps the device busy for longer than the host needs to issue it, the module runs without a pause. It is
    timed after a while: at its power limit a device is slower than after a rest, and in training it never rests.

    If the host cannot issue a module fast enough, the device first sleeps while launches are queued. Events then give
    the device's own time. The host's time is that of several modules in a row, as a model has them, unless the host
    could not limit the module anyway.

    If a module waits for the device (as a loop over experts that reads their counts), device and host cannot be
    separated. Both times are then those of the device.

    Before each pass the second-level cache is overwritten, because in a model a layer's weights and activations have
    left the cache when their turn comes. Then the input of the pass is written once more, because the neighbouring
    layer wrote it last. Neither is in the time.
    """

    BUDGET = TimingBudget(min_repeats=5, max_repeats=50, seconds=0.6)
    MAX_WARM_UP_SECONDS = 0.4
    MAX_WARM_UP_RUNS = 6

    def __init__(self, device: torch.device) -> None:
        self.reducer: Reducer = LocalReducer()
        self._device = device
        self._poll: Callable[[], None] = _look_away
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(2 * cache, dtype=torch.uint8, device=device)
        self._cycles_per_second = measure_clock(self._device)
        self._engine_seconds = self._measure_engine()

    def warm_up(self, passes: Passes) -> None:
        """Run until two successive runs agree within 5%: autotuning, plans and allocations are done by then.

        A long module runs once: a first run adds little to it, and the measurement of memory runs it again.
        """
        started = time.perf_counter()
        previous = None
        for _ in range(self.MAX_WARM_UP_RUNS):
            (sample,) = self._run(passes, repeats=1, sleep_seconds=0.0)
            seconds, elapsed = self.reducer.all_reduce_max(sample.device, time.perf_counter() - started)
            settled = previous is not None and abs(seconds - previous) <= 0.05 * previous
            if settled or elapsed > self.MAX_WARM_UP_SECONDS:
                return
            previous = seconds

    def time(self, passes: Passes, poll: Callable[[], None] = lambda: None) -> Timing:
        """Repeat within the budget; `poll` is called when repeats are issued and the device works on them."""
        self._poll = poll
        try:
            return self._time(passes)
        finally:
            self._poll = _look_away

    def time_waiting(self, passes: Passes) -> WaitingPasses:
        """Return medians of a few runs, with the device asleep while the host issues, and of forwards in a row.

        The device sleeps before backward, too, because forward has used up the host's lead. The host's backward is
        timed without a sleep, because a backward that runs forward again waits for the device.
        """
        with collector_paused():
            sleep = SLEEP_MARGIN * self._run_once(passes, sleep_seconds=0.0).host + 1e-3
            led = [
                self._run(passes, repeats=1, sleep_seconds=sleep, sleeps_between=True)[0] for _ in range(LEAD_REPEATS)
            ]
            rows = [self._time_forwards(passes) for _ in range(HOST_REPEATS)]
            issued = [self._time_backward(passes) for _ in range(HOST_REPEATS)] if passes.training else [0.0]
        return WaitingPasses(
            forward=statistics.median(sample.forward for sample in led),
            backward=statistics.median(sample.backward for sample in led),
            forward_in_row=statistics.median(rows),
            host_backward=statistics.median(issued) / ALONE_OVER_ROW,
        )

    def _time_forwards(self, passes: Passes) -> float:
        passes.prepare_forward()
        torch.cuda.synchronize(self._device)
        passes.forward()
        started = time.perf_counter()
        for _ in range(WAITING_ROW):
            passes.forward()
        return (time.perf_counter() - started) / WAITING_ROW

    def _time_backward(self, passes: Passes) -> float:
        """Host seconds of one backward that begins on an idle device."""
        passes.prepare_forward()
        passes.forward()
        passes.prepare_backward()
        torch.cuda.synchronize(self._device)
        started = time.perf_counter()
        passes.backward()
        return max(0.0, time.perf_counter() - started - self._engine_seconds)

    def _time(self, passes: Passes) -> Timing:
        with collector_paused():
            first = self._run_once(passes, sleep_seconds=0.0)
            if first.host <= CLEARLY_AHEAD * first.device:
                samples = self._time_running(passes, first)
                return summarize([PassSample(s.forward, s.backward, first.host) for s in samples])
            sleep = SLEEP_MARGIN * first.host + 1e-3
            ahead = self._run_once(passes, sleep_seconds=sleep)
            issue = min(first.host, ahead.host)
            if ahead.host >= BLOCKED_SHARE * sleep:
                samples = self._time_running(passes, first)
                return summarize([PassSample(s.forward, s.backward, s.device) for s in samples])
            host = self._time_host(passes, issue, ahead.device)
            if ahead.device >= DEVICE_BOUND * issue:
                samples = self._time_running(passes, ahead)
            else:
                samples = self._time_queued(passes, issue)
            return summarize([PassSample(s.forward, s.backward, host) for s in samples])

    def _time_running(self, passes: Passes, first: PassSample) -> list[PassSample]:
        """Repeats without a pause of the device.

        In the first repeat of a batch the host may not be ahead yet, so it counts only if the host's lead does not
        matter. `first` then counts as well, if it ran for long enough to heat the device by itself.
        """
        heat = int(HEAT_SECONDS / first.device)
        if heat:
            self._run(passes, repeats=heat, sleep_seconds=0.0)
        skipped = 0 if first.host <= CLEARLY_AHEAD * first.device else 1
        batch = skipped + max(1, min(8, heat))
        samples = [] if heat or skipped else [first]
        started = time.perf_counter() - sum(s.device for s in samples)
        while not self.BUDGET.is_spent_for_all(samples, time.perf_counter() - started, self.reducer):
            samples += self._run(passes, repeats=batch, sleep_seconds=0.0)[skipped:]
        return samples

    def _time_queued(self, passes: Passes, issue_seconds: float) -> list[PassSample]:
        """Repeats in batches small enough for the launch queue, which fills while the device sleeps."""
        batch = max(1, min(8, int(MAX_QUEUED_LAUNCHES * FASTEST_LAUNCH_SECONDS / issue_seconds)))
        sleep = SLEEP_MARGIN * batch * issue_seconds + 2e-4
        samples: list[PassSample] = []
        started = time.perf_counter()
        while not self.BUDGET.is_spent_for_all(samples, time.perf_counter() - started, self.reducer):
            samples += self._run(passes, repeats=batch, sleep_seconds=sleep)
        return samples

    def _time_host(self, passes: Passes, issue_seconds: float, device_seconds: float) -> float:
        """Host seconds of one module in a row of them, or of the module alone if it cannot run in a row."""
        if passes.is_chainable and issue_seconds < HOST_MATTERS * device_seconds:
            return issue_seconds / ALONE_OVER_ROW
        for length in CHAIN_LENGTHS if passes.is_chainable else ():
            try:
                return min(issue_seconds, self._time_chain(passes, length))
            except torch.cuda.OutOfMemoryError:  # so many do not fit, one did
                continue
        return issue_seconds

    def _time_chain(self, passes: Passes, length: int) -> float:
        """Host seconds of one of `length` modules in a row; the first row allocates and is not counted."""
        seconds = []
        for _ in range(HOST_REPEATS + 1):
            passes.prepare_forward()
            torch.cuda.synchronize(self._device)
            started = time.perf_counter()
            passes.run_chain(length)
            seconds.append((time.perf_counter() - started - self._engine_seconds) / length)
        return statistics.median(seconds[1:])

    def _run_once(self, passes: Passes, *, sleep_seconds: float) -> PassSample:
        """One repeat with the times of the slowest process. All processes decide by it what to do next."""
        (own,) = self._run(passes, repeats=1, sleep_seconds=sleep_seconds)
        return PassSample(*self.reducer.all_reduce_max(own.forward, own.backward, own.host))

    def _run(
        self, passes: Passes, *, repeats: int, sleep_seconds: float, sleeps_between: bool = False
    ) -> list[PassSample]:
        """Put the device to sleep, issue `repeats` repeats, and wait for all of them.

        With `sleeps_between` it sleeps as long between forward and backward.
        """
        torch.cuda.synchronize(self._device)
        self._sleep(sleep_seconds)
        issued = [self._issue(passes, sleep_seconds if sleeps_between else 0.0) for _ in range(repeats)]
        self._poll()
        torch.cuda.synchronize(self._device)
        samples = []
        for events, host in issued:
            forward = events.before_forward.elapsed_time(events.after_forward) / 1e3
            backward = events.before_backward.elapsed_time(events.after_backward) / 1e3 if passes.training else 0.0
            samples.append(PassSample(forward, backward, host))
        return samples

    def _sleep(self, seconds: float) -> None:
        if seconds > 0:
            torch.cuda._sleep(int(seconds * self._cycles_per_second))

    def _issue(self, passes: Passes, sleep_between: float) -> tuple[_Events, float]:
        events = _Events(*(torch.cuda.Event(enable_timing=True) for _ in range(4)))
        self._flush.zero_()
        passes.prepare_forward()
        events.before_forward.record()
        started = time.perf_counter()
        passes.forward()
        host = time.perf_counter() - started
        events.after_forward.record()
        if passes.training:
            self._sleep(sleep_between)
            self._flush.zero_()
            passes.prepare_backward()
            events.before_backward.record()
            started = time.perf_counter()
            passes.backward()
            # A model enters the autograd engine once a step, not once a block.
            host += max(0.0, time.perf_counter() - started - self._engine_seconds)
            events.after_backward.record()
        return events, host

    def _measure_engine(self) -> float:
        """Host seconds of a backward through almost nothing."""
        x = torch.zeros(1, device=self._device, requires_grad=True)
        gradient = torch.ones(1, device=self._device)
        seconds = []
        for _ in range(20):
            y = x.view(1)
            started = time.perf_counter()
            torch.autograd.backward(y, gradient)
            seconds.append(time.perf_counter() - started)
            x.grad = None
        return statistics.median(seconds)


def measure_clock(device: torch.device) -> float:
    """Return how many cycles of `torch.cuda._sleep` the device runs in a second."""
    cycles = 2_000_000
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles)
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    torch.cuda.synchronize(device)
    return cycles / (float(start.elapsed_time(end)) / 1e3)


def _look_away() -> None:
    """The poll of a warm-up."""
