"""Times blocks on a CUDA device with events, apart from the host that issues them."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from workers.profiler.passes import Passes
from workers.profiler.timing import PassSample, Timing, TimingBudget, collector_paused, summarize

MAX_QUEUED_LAUNCHES = 800
"""The driver blocks the host at about 1024 queued launches; stay below."""
FASTEST_LAUNCH_SECONDS = 2.5e-6
"""No host issues an eager operation faster, so issue time over this bounds the number of launches."""
SLEEP_MARGIN = 1.5
BLOCKED_SHARE = 0.9
"""A host that needed this share of the device's sleep to issue a repeat was waiting for the device."""


@dataclass(frozen=True, slots=True)
class _Events:
    before_forward: torch.cuda.Event
    after_forward: torch.cuda.Event
    before_backward: torch.cuda.Event
    after_backward: torch.cuda.Event


class CudaTimer:
    """Times the passes of a block back to back.

    The device is first put to sleep, so that the host is ahead when the repeats begin and its launches are queued:
    events then give the device's own time, and the wall clock the host's. Repeats are issued in batches small enough
    for the launch queue. A block that waits for the device (a loop over experts that reads their counts, say) cannot
    be told apart from its host; it is timed without sleep, and both times are what passed on the device.

    Before each pass the second-level cache is overwritten, since in a model the weights and saved activations of one
    layer are long gone from it when their turn comes; then the pass's input is written once more, since that is what
    the neighbouring layer did last. Neither is in the time.
    """

    BUDGET = TimingBudget(min_repeats=5, max_repeats=50, seconds=0.6)
    MAX_WARM_UP_SECONDS = 1.0
    MAX_WARM_UP_RUNS = 6

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(2 * cache, dtype=torch.uint8, device=device)
        self._cycles_per_second = self._measure_clock()
        self._engine_seconds = self._measure_engine()

    def warm_up(self, passes: Passes) -> None:
        """Run until two successive runs agree within 5%: autotuning, plans and allocations are done then."""
        started = time.perf_counter()
        previous = None
        for _ in range(self.MAX_WARM_UP_RUNS):
            (sample,) = self._run(passes, repeats=1, sleep_seconds=0.0)
            settled = previous is not None and abs(sample.device - previous) <= 0.05 * previous
            if settled or (previous is not None and time.perf_counter() - started > self.MAX_WARM_UP_SECONDS):
                return
            previous = sample.device

    def time(self, passes: Passes) -> Timing:
        """Repeat within the budget."""
        with collector_paused():
            started = time.perf_counter()
            (plain,) = self._run(passes, repeats=1, sleep_seconds=0.0)
            issue = plain.host
            sleep = SLEEP_MARGIN * issue + 1e-3
            (ahead,) = self._run(passes, repeats=1, sleep_seconds=sleep)
            waits = ahead.host >= BLOCKED_SHARE * sleep
            issue = min(issue, ahead.host)
            batch = max(1, min(8, int(MAX_QUEUED_LAUNCHES * FASTEST_LAUNCH_SECONDS / issue)))
            samples: list[PassSample] = []
            while not self.BUDGET.is_spent([s.device for s in samples], time.perf_counter() - started):
                if waits:
                    found = self._run(passes, repeats=1, sleep_seconds=0.0)
                    samples += [PassSample(s.forward, s.backward, s.device) for s in found]
                else:
                    samples += self._run(passes, repeats=batch, sleep_seconds=SLEEP_MARGIN * batch * issue + 2e-4)
        return summarize(samples)

    def _run(self, passes: Passes, *, repeats: int, sleep_seconds: float) -> list[PassSample]:
        """Issue `repeats` after a sleep of the device, then wait for them all."""
        torch.cuda.synchronize(self._device)
        if sleep_seconds > 0:
            torch.cuda._sleep(int(sleep_seconds * self._cycles_per_second))
        issued = [self._issue(passes) for _ in range(repeats)]
        torch.cuda.synchronize(self._device)
        samples = []
        for events, host in issued:
            forward = events.before_forward.elapsed_time(events.after_forward) / 1e3
            backward = events.before_backward.elapsed_time(events.after_backward) / 1e3 if passes.training else 0.0
            samples.append(PassSample(forward, backward, host))
        return samples

    def _issue(self, passes: Passes) -> tuple[_Events, float]:
        events = _Events(*(torch.cuda.Event(enable_timing=True) for _ in range(4)))
        self._flush.zero_()
        passes.prepare_forward()
        events.before_forward.record()
        started = time.perf_counter()
        passes.forward()
        host = time.perf_counter() - started
        events.after_forward.record()
        if passes.training:
            self._flush.zero_()
            passes.prepare_backward()
            events.before_backward.record()
            started = time.perf_counter()
            passes.backward()
            # A model enters the autograd engine once a step, not once a block.
            host += max(0.0, time.perf_counter() - started - self._engine_seconds)
            events.after_backward.record()
        return events, host

    def _measure_clock(self) -> float:
        """Cycles of `_sleep` a second."""
        cycles = 2_000_000
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        torch.cuda.synchronize(self._device)
        return cycles / (float(start.elapsed_time(end)) / 1e3)

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
