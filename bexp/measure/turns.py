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
from torch import Tensor

from bexp.measure.cuda_timing import (
    BLOCKED_SHARE,
    FASTEST_LAUNCH_SECONDS,
    MAX_QUEUED_LAUNCHES,
    SLEEP_MARGIN,
)
from bexp.measure.timing import collector_off, standard_error

Run = Callable[[], object]
MOST_LINKS = 8
"""The calls of `chained` in one graph."""
FEWEST_ROUNDS = 5
LONGER_SLEEP = 5.0
AHEAD = 1.5
"""A run that takes this many times as long as its issue keeps the host ahead by itself."""


@dataclass(frozen=True, slots=True)
class TurnsBudget:
    """How often and how long: `rounds` turns each, of `chain_seconds` or more each.

    A contender that is `hopeless` times as slow as the fastest runs once more, and is left out of the turns. After
    `most_seconds` no further round begins, but for the first `FEWEST_ROUNDS`.
    """

    rounds: int = 7
    chain_seconds: float = 4e-3
    most_repeats: int = 50
    hopeless: float = 4.0
    most_seconds: float = math.inf


@dataclass(frozen=True, slots=True)
class TurnTiming:
    """Seconds of one run: medians over the turns, and standard errors of these medians.

    `clock_seconds` is what passes in a loop of runs without a wait in between: the larger of the host's and the
    device's time, if neither waits for the other. `device_seconds` is the device's time with the launches queued ahead.
    Both are the same for a run that waits for the device. `in_turns` is false for a contender that was left out.
    """

    clock_seconds: float
    clock_error_seconds: float
    device_seconds: float
    device_error_seconds: float
    rounds: int
    in_turns: bool = True


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

    def timing(self, *, in_turns: bool) -> TurnTiming:
        """Medians and their errors; a single time has no error."""
        device = self.device or self.clock
        clock_error, device_error = (standard_error(s) if len(s) > 1 else 0.0 for s in (self.clock, device))
        clock = statistics.median(self.clock)
        return TurnTiming(
            clock, clock_error, statistics.median(device), device_error, len(self.clock), in_turns=in_turns
        )


def time_in_turns(
    runs: Mapping[str, Run], device: torch.device, budget: TurnsBudget | None = None
) -> dict[str, TurnTiming]:
    """Time every run; each is warmed up first. An exception of a run is the caller's.

    The second-level cache is left as the runs leave it.
    """
    budget = budget or TurnsBudget()
    contenders = {name: _Contender(run) for name, run in runs.items()}
    with collector_off():
        for each in contenders.values():
            _warm_up(each, device, budget)
        fastest = min((each.seconds for each in contenders.values()), default=0.0)
        inside = [each for each in contenders.values() if each.seconds <= budget.hopeless * fastest]
        for each in contenders.values():
            if each not in inside:
                each.clock.append(_chain(each.run, 1, device))
        cycles = _cycles_per_second(device) if device.type == "cuda" else 0.0
        started = time.perf_counter()
        for number in range(budget.rounds):
            if number >= FEWEST_ROUNDS and time.perf_counter() - started > budget.most_seconds:
                break
            order = torch.randperm(len(inside), generator=torch.Generator().manual_seed(number))
            for each in (inside[place] for place in order.tolist()):
                each.clock.append(_chain(each.run, each.repeats, device))
                if cycles and not each.waits:
                    _add_queued(each, cycles, device)
    return {name: each.timing(in_turns=each in inside) for name, each in contenders.items()}


def chained(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], gradient: Tensor, most_bytes: int = 2 << 30
) -> tuple[Run, int]:
    """Return a forward and backward of several calls of `function` on `inputs` in one graph, and how many calls it has.

    A model enters autograd's engine once for many layers, not once for each. All `inputs` get gradients, which are
    written and not added to others. Each call has copies of its own, so that it does not find its operands in a cache.
    There are at most eight calls, and one, on the `inputs` themselves, if more would need over `most_bytes`.
    """
    call_bytes = 2 * sum(x.nbytes for x in inputs) + 2 * gradient.nbytes
    links = max(1, min(MOST_LINKS, most_bytes // max(1, call_bytes)))
    leaves = [
        tuple((x.detach() if links == 1 else x.detach().clone()).requires_grad_() for x in inputs) for _ in range(links)
    ]
    together = [leaf for link in leaves for leaf in link]

    def run() -> None:
        outputs = [function(*link) for link in leaves]
        torch.autograd.grad(outputs, together, [gradient.view_as(out) for out in outputs])

    return run, links


def _warm_up(each: _Contender, device: torch.device, budget: TurnsBudget) -> None:
    """Run a few times, and find out how many runs a turn has."""
    for _ in range(2):
        _chain(each.run, 1, device)
    started = time.perf_counter()
    each.run()
    each.issue_seconds = time.perf_counter() - started
    synchronize(device)
    each.seconds = min(time.perf_counter() - started, _chain(each.run, 2, device))
    each.repeats = max(1, min(budget.most_repeats, int(budget.chain_seconds / max(each.seconds, 1e-9))))
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


def _cycles_per_second(device: torch.device) -> float:
    cycles = 2_000_000
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles)
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    synchronize(device)
    return cycles / (float(start.elapsed_time(end)) / 1e3)


def synchronize(device: torch.device) -> None:
    """Wait for a CUDA device; the CPU has done its work already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
