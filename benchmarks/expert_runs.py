"""Checks expert kernels, and times them in turns. A failure is an outcome, also one that ends the process."""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from benchmarks.expert_problems import Prepared
from benchmarks.isolation import LostError, Send, messages
from benchmarks.turns import Run, TurnsBudget, TurnTiming, time_in_turns
from bexp.explorer.records.measurement import Outcome
from bexp.measure.timestamps import synchronize
from bexp.workers.instruments.failures import classify, is_poisoned

TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-5}
"""Largest relative error in norm of an output or a gradient."""
SILENCE_SECONDS = 120.0
"""A contender that takes longer hangs. Kernels are built in this time."""
START = "start"
TURNS = "turns"
"""What is sent in place of a contender's name when all are timed."""
WRONG = "wrong"
"""The outcome of a result that is further from float64."""
BUDGET = TurnsBudget(rounds=7, most_seconds=2.5)
SLOW_SECONDS = 0.05
"""Contenders that take longer have so many turns of one run each, by the clock, which is the device's time then."""
SLOW_TURNS = 3
HOPELESS = 8.0
"""A contender that is so many times slower than the fastest runs once more, and not in turns."""


class Problem(Protocol):
    """What contenders compute: `wanted` are the results `names` in float64, rounded to float32."""

    names: Sequence[str]
    wanted: list[Tensor]
    flops: int

    def contenders(self) -> dict[str, str | None]:
        """Return their names, and why one cannot serve this."""

    def prepare(self, name: str) -> Prepared:
        """Return one on its operands."""


class Cell(Protocol):
    """Problems whose contenders take turns."""

    @property
    def key(self) -> dict[str, Any]:
        """What its rows have in common."""

    @property
    def dtype(self) -> torch.dtype:
        """The number format."""

    @property
    def poisons(self) -> bool:
        """Whether new memory holds NaN when results are checked. Compiled code is then compiled twice."""

    def problems(self, device: torch.device) -> Iterator[tuple[dict[str, Any], Problem]]:
        """Yield each problem, and what its rows have in addition to their cell."""


AnyCell = TypeVar("AnyCell", bound=Cell)


@dataclass
class _Contender:
    run: Run
    row: dict[str, Any]


def missing(cells: Sequence[AnyCell], rows: Sequence[dict[str, Any]]) -> list[AnyCell]:
    """Return the cells that have no rows yet."""
    return [cell for cell in cells if not any(cell.key.items() <= row.items() for row in rows)]


def measure(cells: Sequence[Cell], device: str, deadline: float) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each cell, those that took a process down included, until the deadline.

    A contender that hangs is left out of later cells, for each such wait is long.
    """
    done, lost, hung = 0, dict[str, dict[str, Any]](), set[str]()
    while done < len(cells) and time.monotonic() < deadline:
        begun, found = START, list[dict[str, Any]]()
        arguments = (cells[done:], device, frozenset(lost), frozenset(hung), deadline - time.monotonic())
        first = done
        try:
            for message in messages(run_cells, *arguments, silence_seconds=SILENCE_SECONDS):
                if isinstance(message, str):
                    begun = message
                    continue
                number, rows = message
                if begun == TURNS:  # they are timed
                    yield [*rows, *lost.values()]
                    begun, done, lost, found = START, first + number + 1, {}, []
                else:
                    found = rows
        except LostError as error:
            outcome = Outcome.TIMED_OUT if "nothing within" in str(error) else Outcome.CRASHED
            row = cells[done].key | {"contender": begun, "outcome": outcome.value, "reason": str(error)}
            if begun in {START, TURNS} or begun in lost:
                yield [*found, *lost.values(), row]
                done, lost = done + 1, {}
            else:
                lost[begun] = row
                if outcome is Outcome.TIMED_OUT:
                    hung.add(begun)
        else:
            return


def run_cells(
    send: Send,
    cells: Sequence[Cell],
    device_name: str,
    without: frozenset[str],
    without_anywhere: frozenset[str],
    max_seconds: float,
) -> None:
    """Send the name of each contender when it begins, in a text, and the rows of each cell, twice: untimed, then timed.

    `without` are contenders that took a process down in the first of the cells. No cell is begun after `max_seconds`.
    """
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    started = time.monotonic()
    for number, cell in enumerate(cells):
        if time.monotonic() - started > max_seconds:
            return
        for rows in _run_cell(send, cell, device, without_anywhere if number else without | without_anywhere):
            send((number, rows))
        _release(device)


def _run_cell(send: Send, cell: Cell, device: torch.device, without: frozenset[str]) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of a cell, before they are timed and after."""
    rows: list[dict[str, Any]] = []
    checked: dict[str, _Contender] = {}
    for named, problem in cell.problems(device):
        for name, reason in problem.contenders().items():
            row = {**cell.key, **named, "contender": name}
            rows.append(row)
            if name in without:
                continue
            if reason is not None:
                row |= {"outcome": Outcome.UNSUPPORTED.value, "reason": reason}
                continue
            send(name)
            prepared = _check(row, name, problem, device, cell)
            if is_poisoned(device):
                raise RuntimeError(row.get("reason"))
            if prepared is not None:
                checked[f"{name} {named}"] = _Contender(prepared.run, row)
        problem.wanted = []
    rows = [row for row in rows if "outcome" in row]
    yield rows
    send(TURNS)
    _time(checked, device)
    for row in rows:
        if "seconds" in row:
            row["flops_per_second"] = row["flops"] / row["seconds"]
    yield rows


def _check(row: dict[str, Any], name: str, problem: Problem, device: torch.device, cell: Cell) -> Prepared | None:
    """Run it: its outcome, errors and peak enter the row. What is not written shows, for new tensors hold NaN.

    Return the contender if its result is right.
    """
    on_cuda, tolerance = device.type == "cuda", TOLERANCES[cell.dtype]
    _release(device)
    try:
        prepared = problem.prepare(name)
        with _poisoned() if cell.poisons else nullcontext():
            prepared.run()  # builds kernels, and chooses among them
            if on_cuda:
                _release(device)
                torch.cuda.reset_peak_memory_stats(device)
            held = torch.cuda.memory_allocated(device) if on_cuda else 0
            found = prepared.run()
            synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - held + prepared.operand_bytes if on_cuda else None
        ordered = zip(problem.names, prepared.in_order(found), problem.wanted, strict=True)
        errors = {result: relative_error(actual, wanted) for result, actual, wanted in ordered}
        del found
        started = time.perf_counter()
        prepared.run()
        synchronize(device)
        once = time.perf_counter() - started
    except Exception as error:  # noqa: BLE001 - whatever a contender raises is its outcome
        outcome, reason = classify(error)
        row |= {"outcome": outcome.value, "reason": reason}
        return None
    finally:
        _release(device)
    largest = max(errors.values())
    row |= {
        "outcome": Outcome.OK.value if largest <= tolerance else WRONG,
        "errors": {result: error if math.isfinite(error) else None for result, error in errors.items()},
        "largest_error": largest if math.isfinite(largest) else None,
        "peak_bytes": peak,
        "flops": problem.flops,
        **prepared.setting,
        "seconds_once": once,
    }
    return prepared if largest <= tolerance else None


def relative_error(actual: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted, in parts of bounded size; infinite for NaN."""
    squares = [0.0, 0.0]
    parts = zip(actual.flatten().split(1 << 28), wanted.flatten().split(1 << 28), strict=True)
    for one, other in parts:
        squares[0] += float((one.double() - other.double()).square().sum())
        squares[1] += float(other.double().square().sum())
    return math.inf if math.isnan(squares[0]) else math.sqrt(squares[0] / max(squares[1], 1e-60))


def _time(checked: Mapping[str, _Contender], device: torch.device) -> None:
    """Time forward and backward of those that are right, in turns; write the seconds into their rows."""
    once = {name: each.row["seconds_once"] for name, each in checked.items()}
    fastest = min(once.values(), default=0.0)
    fast = {name: checked[name].run for name, seconds in once.items() if seconds <= SLOW_SECONDS}
    slow = {name: checked[name].run for name, seconds in once.items() if seconds > SLOW_SECONDS}
    hopeless = {name for name in slow if once[name] > max(HOPELESS * fastest, 10 * SLOW_SECONDS)}
    _release(device)
    timings: dict[str, TurnTiming] = time_in_turns(fast, device, BUDGET) if fast else {}
    timings |= _slow_turns({name: run for name, run in slow.items() if name not in hopeless}, device)
    for name, timing in timings.items():
        checked[name].row |= {
            "seconds": timing.clock_seconds,
            "clock_error_seconds": timing.clock_error_seconds,
            "device_seconds": timing.device_seconds,
            "device_error_seconds": timing.device_error_seconds,
            "turns": timing.rounds,
        }
    for name in hopeless:
        checked[name].row |= {"seconds": once[name], "device_seconds": once[name], "turns": 1}


def _slow_turns(runs: Mapping[str, Run], device: torch.device) -> dict[str, TurnTiming]:
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(SLOW_TURNS):
        for name in list(runs)[:: 1 if number % 2 else -1]:
            synchronize(device)
            started = time.perf_counter()
            runs[name]()
            synchronize(device)
            seconds[name].append(time.perf_counter() - started)
    spread = {name: (max(each) - min(each)) / 2 for name, each in seconds.items()}
    middle = {name: sorted(each)[len(each) // 2] for name, each in seconds.items()}
    return {
        name: TurnTiming(middle[name], spread[name], middle[name], spread[name], len(each))
        for name, each in seconds.items()
    }


@contextmanager
def _poisoned() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]  # not in its stubs
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
