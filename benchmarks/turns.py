"""Times several ways of doing the same in turns: by the clock in a loop that launches them, and on the device alone.

A device's clock rate, its temperature and the host's other work change within seconds. Contenders that run in turns
meet the same conditions, so that their ratio depends on them less than on the contenders. Each round has an order of
its own, so that what one leaves behind, such as heat or a lower clock rate, is not always met by the same other.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from bexp.measure.cuda_timing import (
    BLOCKED_SHARE,
    FASTEST_LAUNCH_SECONDS,
    MAX_QUEUED_LAUNCHES,
    SLEEP_MARGIN,
    measure_clock,
)
from bexp.measure.timestamps import synchronize
from bexp.measure.timing import collector_off, standard_error

Run = Callable[[], object]
FEWEST_ROUNDS = 5
FEWEST_REPEATS, MOST_REPEATS = 3, 50
LONG_SECONDS = 0.02
"""A longer run stands alone: waiting for its first launch adds nothing to it."""
LONGER_SLEEP = 5.0
AHEAD = 1.5
"""A run that takes this many times as long as its issue keeps the host ahead by itself."""


@dataclass(frozen=True, slots=True)
class TurnsBudget:
    """How often and how long: `rounds` turns each, of about `chain_seconds` or FEWEST_REPEATS runs each.

    After `most_seconds` no further round begins, but for the first `FEWEST_ROUNDS`.
    """

    rounds: int
    chain_seconds: float = 4e-3
    most_seconds: float = math.inf


@dataclass(frozen=True, slots=True)
class TurnTiming:
    """Seconds of one run: medians over the turns, and standard errors of these medians.

    `clock_seconds` is what passes in a loop of runs without a wait in between: the larger of the host's and the
    device's time, if neither waits for the other. `device_seconds` is the device's time with the launches queued ahead.
    Both are the same for a run that waits for the device.
    """

    clock_seconds: float
    clock_error_seconds: float
    device_seconds: float
    device_error_seconds: float
    rounds: int


@dataclass(slots=True)
class _Contender:
    run: Run
    seconds: float = 0.0
    issue_seconds: float = 0.0
    repeats: int = 1
    queued: int = 1
    blocked: int = 0
    waits: bool = False
    clock: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)

    def timing(self) -> TurnTiming:
        """Medians and their errors; a single time has no error."""
        device = self.device or self.clock
        clock_error, device_error = (standard_error(s) if len(s) > 1 else 0.0 for s in (self.clock, device))
        clock = statistics.median(self.clock)
        return TurnTiming(clock, clock_error, statistics.median(device), device_error, len(self.clock))


def seconds_once(run: Run, device: torch.device) -> float:
    """Seconds of the fastest of three runs, by the clock."""
    seconds = []
    for _ in range(3):
        synchronize(device)
        started = time.perf_counter()
        run()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def time_in_turns(runs: Mapping[str, Run], device: torch.device, budget: TurnsBudget) -> dict[str, TurnTiming]:
    """Time every run; each is warmed up first. An exception of a run is the caller's.

    The second-level cache is left as the runs leave it.
    """
    contenders = {name: _Contender(run) for name, run in runs.items()}
    listed = list(contenders.values())
    with collector_off():
        for each in listed:
            _warm_up(each, device, budget)
        cycles = measure_clock(device) if device.type == "cuda" else 0.0
        started = time.perf_counter()
        for number in range(budget.rounds):
            if number >= FEWEST_ROUNDS and time.perf_counter() - started > budget.most_seconds:
                break
            order = torch.randperm(len(listed), generator=torch.Generator().manual_seed(number))
            for each in (listed[place] for place in order.tolist()):
                each.clock.append(_chain(each.run, each.repeats, device))
                if cycles and not each.waits:
                    _add_queued(each, cycles, device)
    return {name: each.timing() for name, each in contenders.items()}


def _warm_up(each: _Contender, device: torch.device, budget: TurnsBudget) -> None:
    """Run a few times, and find out how many runs a turn has."""
    for _ in range(2):
        _chain(each.run, 1, device)
    started = time.perf_counter()
    each.run()
    each.issue_seconds = time.perf_counter() - started
    synchronize(device)
    each.seconds = min(time.perf_counter() - started, _chain(each.run, 2, device))
    fewest = 1 if each.seconds >= LONG_SECONDS else FEWEST_REPEATS
    each.repeats = max(fewest, min(MOST_REPEATS, int(budget.chain_seconds / max(each.seconds, 1e-9))))
    queue = int(MAX_QUEUED_LAUNCHES * FASTEST_LAUNCH_SECONDS / max(each.issue_seconds, 1e-9))
    each.queued = max(1, min(each.repeats, queue))


def _chain(run: Run, repeats: int, device: torch.device) -> float:
    """Seconds of one of `repeats` runs, by the clock."""
    synchronize(device)
    started = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronize(device)
    return (time.perf_counter() - started) / repeats


def _add_queued(each: _Contender, cycles_per_second: float, device: torch.device) -> None:
    """Add a time on the device, or note that the run waits for the device, so that nothing can be queued.

    A device that has slept clocks higher than one that works, so it sleeps only where the host could not stay ahead. A
    host that was disturbed may take longer than the device sleeps. So a run waits only if it outlasts a second sleep
    that is much longer, and does so in its first two turns.
    """
    if each.seconds >= AHEAD * each.issue_seconds:
        each.device.append(_queue(each, 0.0, cycles_per_second, device)[1])
        return
    sleep = SLEEP_MARGIN * each.queued * each.issue_seconds + 1e-3
    for longer in (sleep, LONGER_SLEEP * sleep):
        issued, seconds = _queue(each, longer, cycles_per_second, device)
        if issued < BLOCKED_SHARE * longer:
            each.device.append(seconds)
            return
    each.blocked += 1
    each.waits = each.blocked > 1 and not each.device


def _queue(each: _Contender, sleep: float, cycles_per_second: float, device: torch.device) -> tuple[float, float]:
    """Issue runs while the device sleeps, or behind another run; the host's seconds for all, the device's for one."""
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    started = time.perf_counter()
    if sleep:
        torch.cuda._sleep(int(sleep * cycles_per_second))
    else:
        each.run()
    before.record()
    for _ in range(each.queued):
        each.run()
    after.record()
    issued = time.perf_counter() - started
    synchronize(device)
    return issued, float(before.elapsed_time(after)) / 1e3 / each.queued
