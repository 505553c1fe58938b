"""Runs commands as children: builds of kernels side by side, then one measurement a device, each with a time limit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from benchmarks.refresh.result import Recorded, State, Step, in_order

STOP_SECONDS = 10.0
"""What a child gets to end by itself, and again after an interrupt, before it is killed."""
BUILD_SECONDS = 150.0
"""The limit of one build."""
LARGE_BUILDS = 6
"""So many builds that need much memory run at a time."""
SUMMARY_SECONDS = 30.0
LATE = 2.5
"""A child may take so many times what was expected of it."""


@dataclass
class Refresh:
    """One run of the command: results in `folder`, incomplete ones in `drafts`, until `end` (monotonic seconds)."""

    folder: Path
    drafts: Path
    end: float
    devices: list[str]
    say: Callable[[str], None] = print
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self.end - time.monotonic()

    def run(self, results: Sequence[Recorded]) -> None:
        """Build kernels, then measure what fits. A failure of one result is noted, and the rest goes on."""
        self.drafts.mkdir(parents=True, exist_ok=True)
        todo = self._todo(results)
        build(todo, self.left / 3, self.say)
        tried: set[str] = set()
        while todo := [state for state in self._todo(results) if state.result.name not in tried]:
            several, group = next(groupby(todo, lambda state: state.result.num_devices > 1))
            tried |= self._alone(next(group)) if several else self._side_by_side(list(group))

    def _todo(self, results: Sequence[Recorded]) -> list[State]:
        fitting = [result for result in results if result.num_devices <= len(self.devices)]
        return in_order([result.state(self.folder, self.drafts) for result in fitting], self.left - STOP_SECONDS)

    def _alone(self, state: State) -> set[str]:
        self._measure(state, self.devices[: state.result.num_devices])
        return {state.result.name}

    def _side_by_side(self, states: list[State]) -> set[str]:
        """One result to each device; a device that is done takes the next. Results of one file follow each other."""
        queue, lock, busy, tried = list(states), threading.Lock(), set[str](), set[str]()

        def take() -> State | None:
            with lock:
                found = next((state for state in queue if state.result.file not in busy), None)
                if found is not None:
                    queue.remove(found)
                    busy.add(found.result.file)
                    tried.add(found.result.name)
                return found

        def lane(device: str) -> None:
            while (state := take()) is not None:
                try:
                    self._measure(state.result.state(self.folder, self.drafts), [device])
                finally:
                    busy.discard(state.result.file)

        with ThreadPoolExecutor(len(self.devices)) as pool:
            for each in [pool.submit(lane, device) for device in self.devices]:
                each.result()
        return tried

    def _measure(self, state: State, devices: list[str]) -> None:
        result, draft = state.result, self.drafts / state.result.file
        seconds = min(self.left - STOP_SECONDS, LATE * state.seconds)
        if seconds < result.start_seconds + result.row_seconds:
            self.notes[result.name] = "no time was left"
            return
        if state.is_current and (state.draft is None or not state.is_replaced):
            shutil.copy(self.folder / result.file, draft)
        elif state.draft is not None and result.of_kernels and not set(result.rows) - set(state.missing):
            draft.unlink()  # of earlier kernels, or empty: nothing in it can be continued
        step = Step(draft, "cuda:0" if devices[0].startswith("cuda") else devices[0], seconds, state.missing)
        numbers = ",".join(device.partition(":")[2] for device in devices if device.startswith("cuda:"))
        environment = dict(result.environment) | ({"CUDA_VISIBLE_DEVICES": numbers} if numbers else {})
        self.say(f"{result.name}: {len(state.missing)} rows on {','.join(devices)}, at most {seconds:.0f} s")
        log = self.drafts / f"{result.name}.log"
        try:
            status = run_child(result.command(step), seconds + STOP_SECONDS, environment, log)
        except Exception as error:  # noqa: BLE001 - whatever a command's plan raises must not end the others
            status = f"{type(error).__name__}: {error}"
        self.notes[result.name] = status
        after = result.state(self.folder, self.drafts)
        if after.is_replaced:
            shutil.copy(draft, self.folder / f"{result.file}.part")
            (self.folder / f"{result.file}.part").replace(self.folder / result.file)
            self._summarize(result)
        gained = len(state.missing) - len(after.missing)
        self.say(f"{result.name}: {status}, {gained} rows gained" + ("" if status == "ended" else f"; see {log}"))

    def _summarize(self, result: Recorded) -> None:
        """Write the file that is printed from a result; one that is no JSON is noted and left as it was."""
        if result.summary is None or result.summarize is None:
            return
        draft = self.drafts / result.summary
        draft.unlink(missing_ok=True)
        status = run_child(result.summarize(self.folder / result.file), SUMMARY_SECONDS, {}, draft)
        try:
            json.loads(draft.read_text())
        except ValueError:
            self.notes[result.name] += f", its summary: {status}, and no JSON"
        else:
            draft.replace(self.folder / result.summary)


def build(states: Iterable[State], seconds: float, say: Callable[[str], None] = print) -> list[str]:
    """Run the builds of these results, as many at a time as there are cores; return what went wrong."""
    end = time.monotonic() + seconds
    known = dict.fromkeys((command, large) for state in states for command, large in _builds(state.result))
    cores, large_ones = len(os.sched_getaffinity(0)), threading.BoundedSemaphore(LARGE_BUILDS)

    def run(of: tuple[tuple[str, ...], bool]) -> str | None:
        command, large = of
        with large_ones if large else threading.Lock():
            left = min(BUILD_SECONDS, end - time.monotonic())
            status = run_child([*command], left, {"OMP_NUM_THREADS": "1"}) if left > 0 else "no time was left"
        return None if status == "ended" else f"build {' '.join(command[2:])}: {status}"

    started = time.monotonic()
    with ThreadPoolExecutor(cores) as pool:
        wrong = [found for found in pool.map(run, known) if found is not None]
    if known:
        say(f"{len(known)} builds by {cores} processes in {time.monotonic() - started:.0f} s")
    for text in wrong:
        say(text)
    return wrong


def _builds(result: Recorded) -> list[tuple[tuple[str, ...], bool]]:
    return [(command, True) for command in result.large_builds] + [(command, False) for command in result.builds]


def run_child(command: list[str], seconds: float, environment: dict[str, str], log: Path | None = None) -> str:
    """Run a command with its own children: `ended`, `status N`, `out of time` or why it did not start.

    After its time the whole process group is interrupted, and killed if it has not ended `STOP_SECONDS` later.
    """
    with (log or Path(os.devnull)).open("ab") as out:
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | environment,
                start_new_session=True,
            )
        except OSError as error:
            return f"did not start: {error}"
        try:
            status = child.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            _signal(child, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                child.wait(STOP_SECONDS)
            return "out of time"
        finally:
            _signal(child, signal.SIGKILL)
            child.wait()
    return "ended" if status == 0 else f"status {status}"


def _signal(child: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, number)
