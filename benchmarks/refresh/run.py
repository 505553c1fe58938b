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
POLL_SECONDS = 0.2
"""How often a child's wait looks whether the whole run is to stop."""
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
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self.end - time.monotonic()

    def run(self, results: Sequence[Recorded]) -> None:
        """Build kernels, then measure what fits. A failure of one result is noted, and the rest goes on.

        Raises KeyboardInterrupt when it is interrupted, after all children have ended.
        """
        for folder in (self.folder, self.drafts):
            folder.mkdir(parents=True, exist_ok=True)
        for result in results:  # a run that was killed may have left a whole draft
            self._replace(result)
        todo = self._todo(results)
        if self.devices[0].startswith("cuda"):
            build(todo, self.left / 3, self.say, _visible(self.devices[:1]), self.stop)
        tried: set[str] = set()
        while todo := [state for state in self._todo(results) if state.result.name not in tried]:
            several, group = next(groupby(todo, lambda state: state.result.num_devices > 1))
            tried |= self._alone(next(group)) if several else self._side_by_side(list(group))

    def _todo(self, results: Sequence[Recorded]) -> list[State]:
        fitting = [result for result in results if result.num_devices <= len(self.devices)]
        return in_order([result.state(self.folder, self.drafts) for result in fitting], self.left - 2 * STOP_SECONDS)

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
            while not self.stop.is_set() and (state := take()) is not None:
                try:
                    self._measure(state.result.state(self.folder, self.drafts), [device])
                finally:
                    busy.discard(state.result.file)

        with ThreadPoolExecutor(len(self.devices)) as pool:
            lanes = [pool.submit(lane, device) for device in self.devices]
            try:
                for each in lanes:
                    each.result()
            except BaseException:  # an interrupt, for example: the other lanes must not go on
                self.stop.set()
                raise
        return tried

    def _measure(self, state: State, devices: list[str]) -> None:
        result, draft = state.result, self.drafts / state.result.file
        seconds = min(self.left - 2 * STOP_SECONDS, LATE * state.seconds)
        if seconds < result.start_seconds + result.row_seconds:
            self.notes[result.name] = "no time was left"
            return
        if state.is_current and (state.draft is None or not state.is_replaced):
            shutil.copy(self.folder / result.file, draft)
        elif state.draft is not None and result.of_kernels and not set(result.rows) - set(state.missing):
            draft.unlink()  # of earlier kernels, or empty: nothing in it can be continued
        step = Step(draft, "cuda:0" if devices[0].startswith("cuda") else devices[0], seconds, state.missing)
        environment = dict(result.environment) | _visible(devices)
        self.say(f"{result.name}: {len(state.missing)} rows on {','.join(devices)}, at most {seconds:.0f} s")
        log = self.drafts / f"{result.name}.log"
        try:
            status = run_child(result.command(step), seconds + STOP_SECONDS, environment, log, self.stop)
        except Exception as error:  # noqa: BLE001 - whatever a command's plan raises must not end the others
            status = f"{type(error).__name__}: {error}"
        self.notes[result.name] = status
        after = self._replace(result)
        gained = len(state.missing) - len(after.missing)
        self.say(f"{result.name}: {status}, {gained} rows gained" + ("" if status == "ended" else f"; see {log}"))

    def _replace(self, result: Recorded) -> State:
        """Put a draft in the place of the recorded file if it has all of its rows; return the state before that."""
        draft = self.drafts / result.file
        drop_torn_line(draft)
        state = result.state(self.folder, self.drafts)
        if state.is_replaced:
            shutil.copy(draft, self.folder / f"{result.file}.part")
            (self.folder / f"{result.file}.part").replace(self.folder / result.file)
            self._summarize(result)
        return state

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
            note = self.notes.get(result.name, "replaced")
            self.notes[result.name] = f"{note}, its summary: {status}, and no JSON"
        else:
            draft.replace(self.folder / result.summary)


def build(
    states: Iterable[State],
    seconds: float,
    say: Callable[[str], None] = print,
    environment: dict[str, str] | None = None,
    stop: threading.Event | None = None,
) -> list[str]:
    """Run the builds of these results, as many at a time as there are cores; return what went wrong."""
    end = time.monotonic() + seconds
    known = dict.fromkeys((command, large) for state in states for command, large in _builds(state.result))
    stop, environment = stop or threading.Event(), {"OMP_NUM_THREADS": "1"} | (environment or {})
    cores, large_ones = len(os.sched_getaffinity(0)), threading.BoundedSemaphore(LARGE_BUILDS)

    def run(of: tuple[tuple[str, ...], bool]) -> str | None:
        command, large = of
        with large_ones if large else threading.Lock():
            left = min(BUILD_SECONDS, end - time.monotonic())
            begins = left > 0 and not stop.is_set()
            status = run_child([*command], left, environment, stop=stop) if begins else "no time was left"
        return None if status == "ended" else f"build {' '.join(command[2:])}: {status}"

    started = time.monotonic()
    with ThreadPoolExecutor(cores) as pool:
        try:
            wrong = [found for found in pool.map(run, known) if found is not None]
        except BaseException:
            stop.set()
            raise
    if known:
        say(f"{len(known)} builds by {cores} processes in {time.monotonic() - started:.0f} s")
    for text in wrong:
        say(text)
    return wrong


def _builds(result: Recorded) -> list[tuple[tuple[str, ...], bool]]:
    return [(command, True) for command in result.large_builds] + [(command, False) for command in result.builds]


def _visible(devices: list[str]) -> dict[str, str]:
    """Return the variable that shows a child these devices alone; they count among those that this process sees."""
    numbers = [device.partition(":")[2] for device in devices if device.startswith("cuda:")]
    if outer := [each.strip() for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]:
        numbers = [outer[int(number)] for number in numbers if int(number) < len(outer)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(numbers)} if numbers else {}


def drop_torn_line(path: Path) -> None:
    """Take off what stands after the last line end of a file of lines: its writer was killed while it wrote that."""
    if path.suffix == ".jsonl" and path.exists():
        text = path.read_bytes()
        if not text.endswith(b"\n"):
            path.write_bytes(text[: text.rfind(b"\n") + 1])


def run_child(
    command: list[str],
    seconds: float,
    environment: dict[str, str],
    log: Path | None = None,
    stop: threading.Event | None = None,
) -> str:
    """Run a command with its own children: `ended`, `status N`, `out of time`, `stopped` or why it did not start.

    After its time, or when `stop` is set, the whole process group is interrupted, and killed if it has not ended
    `STOP_SECONDS` later.
    """
    end = time.monotonic() + seconds
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
            while (left := end - time.monotonic()) > 0 and not (stop is not None and stop.is_set()):
                with suppress(subprocess.TimeoutExpired):
                    status = child.wait(min(left, POLL_SECONDS))
                    return "ended" if status == 0 else f"status {status}"
            _signal(child, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                child.wait(STOP_SECONDS)
            return "out of time" if left <= 0 else "stopped"
        finally:
            _signal(child, signal.SIGKILL)
            child.wait()


def _signal(child: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, number)
