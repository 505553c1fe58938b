"""Faults in training commands: `python -m tests.chaos.tune_faults --trials 200 --output FILE`.

Each trial starts a real command, which breaks as it says in one of its first steps, before them, or not at all; or it
is ended from outside at any moment. Every trial must have the outcome that its fault says. Afterwards no process of it
is left, the folder of the command and its home are what they were, by a hash of all files, and the next trial works.
Two lanes run side by side. A later call goes on with FILE.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import psutil

from bexp.explorer.records.measurement import Outcome
from bexp.workers.instruments.failures import TargetKilledError, TrialFailedError
from bexp.workers.targets.custom.command import CommandProcess
from bexp.workers.targets.custom.training_command import TrainingCommand
from tests.chaos.result import read_commit
from tests.tune_commands.with_faults import FAULTS, STARTS

MARK = "BEXP_FAULT_TRIAL"
TRIAL_SECONDS, HANG_SECONDS = 120.0, 25.0
"""How long a trial may take, and one that hangs."""
GONE_SECONDS = 10.0
CONTEXT = get_context("spawn")
KILLED, CANCELLED = "killed_from_outside", "ended_by_its_owner"
KINDS = (*FAULTS, *(f"{name}_at_start" for name in STARTS), KILLED, CANCELLED)
FINE = "ok"
EXPECTED: dict[str, frozenset[str]] = {
    "none": frozenset({FINE}),
    "fork": frozenset({FINE}),
    "print": frozenset({FINE}),
    "crash": frozenset({Outcome.CRASHED}),
    "segfault": frozenset({Outcome.CRASHED}),
    "leak": frozenset({Outcome.CRASHED}),
    "kill": frozenset({Outcome.CRASHED}),
    "hang": frozenset({Outcome.TIMED_OUT}),
    "out_of_memory": frozenset({Outcome.OUT_OF_MEMORY}),
    KILLED: frozenset({FINE, Outcome.CRASHED}),
    CANCELLED: frozenset({FINE, CANCELLED}),
}
"""What ends from outside may have been done before."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what FILE lacks, and print how many trials broke a promise."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.tune_faults", description=__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    found: list[dict[str, Any]] = json.loads(options.output.read_text())["trials"] if options.output.exists() else []
    done, lock = {trial["number"] for trial in found}, threading.Lock()

    def run(number: int) -> None:
        trial = run_trial(number, Random(f"{options.seed} {number}"))
        with lock:
            found.append(trial)
            options.output.write_text(json.dumps(summary(found), indent=1))
            sys.stdout.write(f"{json.dumps(trial)}\n")

    with ThreadPoolExecutor(options.lanes) as pool:
        list(pool.map(run, [number for number in range(options.trials) if number not in done]))
    broken = [trial for trial in found if trial["broken"]]
    sys.stdout.write(f"{len(found)} trials, {len(broken)} broke a promise\n")
    return min(1, len(broken))


def summary(trials: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return all trials, and how many there were of each kind."""
    return {
        "commit": read_commit(),
        "num_trials": len(trials),
        "kinds": dict(sorted(Counter(trial["kind"] for trial in trials).items())),
        "num_broken": sum(bool(trial["broken"]) for trial in trials),
        "trials": sorted(trials, key=lambda trial: int(trial["number"])),
    }


def run_trial(number: int, random: Random) -> dict[str, Any]:
    """Run a trial with a fault, and then a clean one of the same command; return what was promised and not kept."""
    kind = KINDS[number % len(KINDS)]
    name = kind.removesuffix("_at_start")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder, "home")
        home.mkdir()
        (home / "data.txt").write_text("the person's own file")
        before, mark = digest(home), f"{os.getpid()}-{number}"
        at = 0 if kind.endswith("_at_start") else random.randrange(1, 12)
        fault = name if name in FAULTS else "none"
        outcome = measured(home, mark, fault, at, _end_of(kind, random))
        broken = [f"its outcome is {outcome}"] if outcome not in EXPECTED[name] else []
        if (alive := left_of(mark)) != []:
            broken.append(f"processes are left: {alive}")
        clean = measured(home, mark, "none", 1, None)
        if clean != FINE:
            broken.append(f"the next trial is {clean}")
        if digest(home) != before:
            broken.append(f"files changed: {sorted(str(path.relative_to(home)) for path in home.rglob('*'))[:9]}")
    return {
        "number": number,
        "kind": kind,
        "at": at,
        "outcome": outcome,
        "seconds": round(time.monotonic() - begun, 1),
        "broken": broken,
    }


def measured(home: Path, mark: str, fault: str, at: int, end: tuple[str, float] | None) -> str:
    """The outcome of a trial of a command in a home of its own, which is perhaps ended after some seconds.

    The trial is made by a process of its own, as that of a profiler, because its owner may kill it.
    """
    receiver, sender = CONTEXT.Pipe(duplex=False)
    trial = CONTEXT.Process(target=_measure, args=(sender, home, mark, fault, at))
    trial.start()
    sender.close()
    timer = None
    if end is not None:
        what, after = end
        timer = threading.Timer(
            after, trial.kill if what == CANCELLED else _kill_command, () if what == CANCELLED else (mark,)
        )
        timer.start()
    try:
        return str(receiver.recv())
    except EOFError:
        return CANCELLED
    finally:
        if timer is not None:
            timer.cancel()
            timer.join()
        trial.join()


def _measure(sender: Any, home: Path, mark: str, fault: str, at: int) -> None:
    script = Path(__file__).parents[1] / "tune_commands" / "with_faults.py"
    inner = (sys.executable, str(script), "--fault", fault, "--at", str(at), "--output_dir", str(home / "out"))
    root = str(script.parents[2])
    line = f'{MARK}={mark} HOME={home} PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="{root}:$PYTHONPATH" exec {" ".join(inner)}'
    process = CommandProcess(TrainingCommand(("sh", "-c", line), str(home), {}, own_folder=str(home.parent)))
    seconds = HANG_SECONDS if fault == "hang" else TRIAL_SECONDS
    outcome = FINE
    try:
        process.ask("open", seconds, device="cpu", choice=None)
        process.ask("describe", seconds)
        process.ask("measure", seconds, micro_batch_size=4)
    except (TrialFailedError, TargetKilledError) as error:
        outcome = str(error.outcome)
    finally:
        process.end()
    sender.send(outcome)


def left_of(mark: str) -> list[str]:
    """The processes with the mark of a trial in their environment, after a moment in which they may end."""
    until = time.monotonic() + GONE_SECONDS
    while (alive := [_name(each) for each in psutil.process_iter() if _has(each, mark)]) and time.monotonic() < until:
        time.sleep(0.1)
    return alive


def digest(folder: Path) -> str:
    """A hash of the names and contents of all files."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        found.update(str(path.relative_to(folder)).encode() + (path.read_bytes() if path.is_file() else b""))
    return found.hexdigest()


def _end_of(kind: str, random: Random) -> tuple[str, float] | None:
    return (kind, random.uniform(0.0, 12.0)) if kind in (KILLED, CANCELLED) else None


def _kill_command(mark: str) -> None:
    """Kill what has the mark and trains, if there is something by now."""
    for each in psutil.process_iter():
        if _has(each, mark):
            with suppress(psutil.Error):
                each.kill()


def _has(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess, OSError):
        return False


def _name(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:80]}"
    except psutil.Error:
        return str(process.pid)


if __name__ == "__main__":
    raise SystemExit(main())
