"""Faults of a device while real jobs run on it: `python -m tests.chaos.gpu_faults --device cuda:0 --output FILE`.

Each round is a job with one fault. Its trial must end as the fault says, the next trial must be clean, nothing that
failed may be recommended, the job must succeed, and the device's memory must come back. Rounds are appended to FILE as
lines of JSON, so that a later call goes on; with `--summary` a call only adds up what FILE has.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from bexp.child_process import module_command
from explorer.records.measurement import Outcome
from explorer.records.trial import Trial, TrialKind
from explorer.search.explore import explore
from explorer.spec.model import DType, ModelSpec
from explorer.spec.options import BTASpec, Budget
from explorer.spec.request import ExplorationRequest
from storage.database import Database, open_database
from storage.jobs import Job, JobState, get_job, get_summary
from storage.queue import Queue
from storage.queue_settings import QueueSettings
from storage.schema import upgrade
from storage.trials import read_all_trials
from tests.chaos.faulty_profiler import VARIABLE
from tests.chaos.result import CANCEL_LIMIT_SECONDS, percentile, read_commit
from workers.devices.gpu import open_gpu
from workers.jobs.worker import Worker
from workers.process import child
from workers.process.profiler import Profiler

JOB_SECONDS = 240.0
SETTLE_SECONDS = 5.0
TOLERATED_BYTES = 512 << 20
"""What libraries may keep on the device after a job, beyond what they kept after the first."""

TRIAL_SECONDS = {"cpu": 8.0, "cuda": 4.0}
SHARED_SECONDS = {"cpu": 60.0, "cuda": 20.0}
"""How long a job searches while another process holds the device."""
ALLOWANCE_SECONDS = 4.0
FIRST_PASSES = 9
"""A component of the second or third trial: the base has been measured by then."""

PHASES = ("start", "open", "begin", "build", "warm_up", "timed", "settle", "reply")
CALM_KINDS = ("cancel", "foreign_process")
BEFORE_TRIALS = {"kill_start", "kill_open", "kill_begin"}
EXPECTED = {
    "out_of_memory": Outcome.OUT_OF_MEMORY,
    "illegal_access": Outcome.CRASHED,
    "hang": Outcome.TIMED_OUT,
    "lost_device": Outcome.CRASHED,
    **{f"kill_{phase}": Outcome.CRASHED for phase in PHASES if f"kill_{phase}" not in BEFORE_TRIALS},
}
ON_A_GPU = ("leak", "lost_device", "foreign_process")
KINDS = (*EXPECTED, *sorted(BEFORE_TRIALS), "leak", *CALM_KINDS)

MODEL = ModelSpec(
    name="small",
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=128,
    num_attention_heads=4,
    vocab_size=512,
    seq_length=64,
    dtype=DType.FLOAT32,
)
TENANT = """
import sys, torch
print("ready", flush=True)
sys.stdin.readline()
held = torch.ones(6 << 30, dtype=torch.uint8, device=sys.argv[1])
torch.cuda.synchronize()
print("holds", flush=True)
sys.stdin.read()
"""


@dataclass
class Round:
    """One job with one fault. `used_bytes` is what all processes hold of the device afterwards; null on the CPU."""

    kind: str
    commit: str
    device: str
    seconds: float = 0.0
    struck: bool = False
    outcomes: dict[str, int] = field(default_factory=dict)
    cancel_seconds: float | None = None
    used_bytes: int | None = None
    violations: list[str] = field(default_factory=list)


class Bench:
    """A queue and a worker on one device, whose profiler processes do what a file tells them to."""

    def __init__(self, device: str, folder: Path, rng: Random) -> None:
        self.device = device
        self.kind = device.partition(":")[0]
        self.rng = rng
        self.fault_file = folder / "fault.json"
        self.database: Database = open_database(f"sqlite:///{folder / 'bexp.db'}")
        upgrade(self.database)
        self.queue = Queue(self.database, QueueSettings(retry_pause=timedelta(seconds=0.2)))
        self._environment = {**os.environ, VARIABLE: str(self.fault_file), "OMP_NUM_THREADS": "1"}
        self._gpu = None if device == "cpu" else open_gpu(device, self._environment)
        self.baseline_bytes: int | None = None
        self.profiler = Profiler(
            device, environment=self._environment, setup_allowance_seconds=ALLOWANCE_SECONDS, lock_directory=folder
        )
        self._worker = Worker(self.queue, self.profiler, device, explore=explore, max_poll_seconds=0.1)
        self._thread = threading.Thread(target=self._worker.run, name="worker")

    def start(self) -> None:
        """Start the worker, and let a job run without a fault, after which memory is what it should be later."""
        self._thread.start()
        job = self.await_end(self.submit())
        assert job.state is JobState.SUCCEEDED, f"without a fault: {job.state}, {job.error}"
        self.baseline_bytes = self.used_bytes()

    def close(self) -> None:
        """End the worker."""
        self._worker.stop()
        self._thread.join(60)
        self.database.dispose()

    def used_bytes(self) -> int | None:
        """Return the bytes that all processes hold of the device."""
        return None if self._gpu is None else self._gpu.used_bytes()

    def submit(self, **changes: Any) -> str:
        """Queue a small job; return its id."""
        fields: dict[str, Any] = {
            "model": MODEL,
            "micro_batch_size": (1, 2, 4, 8),
            "bta": BTASpec(enable=False),
            "attention_backends": ("math",),
            "verify": False,
            "fresh": True,
            "seed": self.rng.randrange(1 << 30),
            "budget": self.budget(max_trials=6, max_seconds=60.0),
        }
        return self.queue.enqueue(ExplorationRequest(**(fields | changes)))[0].id

    def budget(self, *, max_trials: int, max_seconds: float) -> Budget:
        """Return a budget whose trials may take as long as healthy ones need on this kind of device."""
        timeout = TRIAL_SECONDS[self.kind]
        return Budget(
            max_trials=max_trials, confidence_target=99, max_seconds=max_seconds, trial_timeout_seconds=timeout
        )

    def await_end(self, job_id: str) -> Job:
        """Return the job when it has ended, or as it is after JOB_SECONDS."""
        self.await_that(lambda: get_summary(self.database, job_id).state.is_final, JOB_SECONDS)
        return get_job(self.database, job_id)

    def await_that(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until the condition comes true; return whether it did in time."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def await_memory(self, limit: int) -> int | None:
        """Return the bytes in use once they are within the limit, or as they are after SETTLE_SECONDS."""
        self.await_that(lambda: (self.used_bytes() or 0) <= limit, SETTLE_SECONDS)
        return self.used_bytes()


def run_round(bench: Bench, kind: str) -> Round:
    """Run one job with one fault."""
    done = Round(kind, read_commit(), bench.device)
    started = time.monotonic()
    if kind == "cancel":
        _cancel(bench, done)
    elif kind == "foreign_process":
        _share(bench, done)
    else:
        _hurt(bench, done)
    _check_memory(bench, done)
    done.seconds = round(time.monotonic() - started, 2)
    return done


def _hurt(bench: Bench, done: Round) -> None:
    place = done.kind.removeprefix("kill_") if done.kind.startswith("kill_") else "component"
    in_a_trial = done.kind not in BEFORE_TRIALS
    passes = FIRST_PASSES + bench.rng.randrange(4) if in_a_trial and place not in {"settle", "reply"} else 0
    if place in {"settle", "reply"}:
        passes = (4 if place == "settle" else 2) + bench.rng.randrange(2)  # a job begins with up to three settles
    kind = "kill" if done.kind.startswith("kill_") else done.kind
    bench.fault_file.write_text(json.dumps({"kind": kind, "place": place, "passes": passes}))
    if done.kind in {"kill_start", "kill_open"} and (pid := bench.profiler.pid) is not None:
        os.kill(pid, signal.SIGKILL)  # the process is started again, and the fault strikes that one
    job = bench.await_end(bench.submit())
    done.struck = not bench.fault_file.exists()
    bench.fault_file.unlink(missing_ok=True)
    trials = read_all_trials(bench.database, job.id)
    _check_job(done, job, trials)
    expected = EXPECTED.get(done.kind)
    failed = [trial for trial in trials if trial.measurement.outcome is not Outcome.OK]
    if done.struck and expected is not None:
        if [trial.measurement.outcome for trial in failed] != [expected]:
            done.violations.append(f"not one trial was {expected}, but {dict(done.outcomes)}")
    elif failed:
        done.violations.append(f"a trial failed without a reason: {failed[0].measurement.reason}")


def _check_job(done: Round, job: Job, trials: Sequence[Trial]) -> None:
    done.outcomes = dict(Counter(trial.measurement.outcome.value for trial in trials))
    if job.state is not JobState.SUCCEEDED:
        done.violations.append(f"a healthy job is {job.state}: {job.error}")
    if job.recommendation is None:
        return
    outcomes = {
        trial.measurement.outcome
        for trial in trials
        if trial.candidate == job.recommendation.candidate and trial.kind is TrialKind.COMPONENTS
    }
    if outcomes and Outcome.OK not in outcomes:
        done.violations.append(f"what failed is recommended: {job.recommendation.candidate.describe()}")
    by_seq = [trial.measurement for trial in trials]
    for failed, following in pairwise(by_seq):
        if failed.outcome is not Outcome.OK and following.contamination is not None:
            done.violations.append(f"the next trial is not clean: {following.contamination}")


def _cancel(bench: Bench, done: Round) -> None:
    job_id = bench.submit(micro_batch_size="explore", bta=BTASpec(), attention_backends=None)
    bench.await_that(lambda: len(read_all_trials(bench.database, job_id)) > 0, JOB_SECONDS)
    time.sleep(bench.rng.uniform(0.0, 1.0))
    begin = time.monotonic()
    done.struck = not bench.queue.request_cancel(job_id).state.is_final
    job = bench.await_end(job_id)
    if done.struck:
        done.cancel_seconds = round(time.monotonic() - begin, 3)
        if job.state is not JobState.CANCELLED:
            done.violations.append(f"a cancelled job is {job.state}")


def _share(bench: Bench, done: Round) -> None:
    with _tenant(bench.device) as tenant:
        budget = bench.budget(max_trials=200, max_seconds=SHARED_SECONDS[bench.kind])
        job_id = bench.submit(micro_batch_size="explore", bta=BTASpec(), attention_backends=None, budget=budget)
        bench.await_that(lambda: len(read_all_trials(bench.database, job_id)) > 0, JOB_SECONDS)
        tenant()
        num_before = len(read_all_trials(bench.database, job_id))
        job = bench.await_end(job_id)
    trials = read_all_trials(bench.database, job_id)
    _check_job(done, job, trials)
    done.struck = len(trials) > num_before + 1  # else the job was over too soon
    if done.struck and all(trial.measurement.contamination is None for trial in trials):
        done.violations.append("no trial says that the device was shared")
    after = read_all_trials(bench.database, bench.await_end(bench.submit()).id)
    if any(trial.measurement.contamination is not None for trial in after):
        done.violations.append("a trial after the other process is said to share the device")


@contextmanager
def _tenant(device: str) -> Iterator[Callable[[], None]]:
    """Start another process; what is yielded makes it hold some of the device's memory."""
    command = [sys.executable, "-c", TENANT, device]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def hold() -> None:
            stdin.write("go\n")
            stdin.flush()
            assert stdout.readline() == "holds\n"

        try:
            assert stdout.readline() == "ready\n"
            yield hold
        finally:
            process.kill()


def _check_memory(bench: Bench, done: Round) -> None:
    if bench.baseline_bytes is None:
        return
    limit = bench.baseline_bytes + TOLERATED_BYTES
    done.used_bytes = bench.await_memory(limit)
    if done.used_bytes is not None and done.used_bytes > limit:
        done.violations.append(f"{(done.used_bytes - bench.baseline_bytes) >> 20} MiB of the device are not free again")


def add_up(rounds: Sequence[Round]) -> dict[str, object]:
    """Return all rounds as one JSON document."""
    cancels = sorted(done.cancel_seconds for done in rounds if done.cancel_seconds is not None)
    violations = [f"{done.kind}: {text}" for done in rounds for text in done.violations]
    p99 = percentile(cancels, 0.99)
    if p99 is not None and p99 > CANCEL_LIMIT_SECONDS:
        violations.append(f"of {len(cancels)} cancels, 1% took {p99:g} s or longer")
    return {
        "commits": sorted({done.commit for done in rounds}),
        "devices": sorted({done.device for done in rounds}),
        "rounds": dict(sorted(Counter(done.kind for done in rounds).items())),
        "struck": dict(sorted(Counter(done.kind for done in rounds if done.struck).items())),
        "seconds": round(sum(done.seconds for done in rounds), 1),
        "cancels": {
            "num": len(cancels),
            "p50": percentile(cancels, 0.5),
            "p99": p99,
            "max": max(cancels, default=None),
        },
        "largest_used_bytes": max((done.used_bytes for done in rounds if done.used_bytes is not None), default=None),
        "violations": violations,
    }


def read_rounds(path: Path) -> list[Round]:
    """Return the rounds of a file; none if there is no file."""
    return [Round(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def next_kind(kinds: Sequence[str], rounds: Sequence[Round], num_rounds: int) -> str | None:
    """Return the kind that has struck least often, the first of equals; null once each has struck `num_rounds` times.

    A fault that does not strike, because its job took another way, is tried again, at most as often once more.
    """
    tried = Counter(done.kind for done in rounds)
    struck = Counter(done.kind for done in rounds if done.struck)
    open_kinds = [kind for kind in kinds if struck[kind] < num_rounds and tried[kind] < 2 * num_rounds]
    return min(open_kinds, key=lambda kind: (struck[kind], tried[kind]), default=None)


def run(device: str, kinds: Sequence[str], num_rounds: int, output: Path, seconds: float, seed: int) -> None:
    """Append rounds to `output` until there is no next kind or the time is over."""
    ends_at = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="bexp-gpu-faults-") as name, _faulty_profilers():
        bench = Bench(device, Path(name), Random(seed))
        try:
            bench.start()
            while (kind := next_kind(kinds, read_rounds(output), num_rounds)) and time.monotonic() < ends_at:
                done = run_round(bench, kind)
                with output.open("a") as file:
                    file.write(json.dumps(asdict(done)) + "\n")
        finally:
            bench.close()


@contextmanager
def _faulty_profilers() -> Iterator[None]:
    """Have profiler processes run `tests.chaos.faulty_profiler`."""

    def command(module: str, *arguments: str) -> list[str]:
        return module_command("tests.chaos.faulty_profiler" if module == "workers.profiler" else module, *arguments)

    original, child.module_command = child.module_command, command  # type: ignore[attr-defined]  # that it imports
    try:
        yield
    finally:
        child.module_command = original  # type: ignore[attr-defined]  # as above


def main() -> int:
    """Run rounds, print their sum, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.gpu_faults", description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rounds", type=int, default=20, help="of each kind")
    parser.add_argument("--minutes", type=float, default=9.0, help="no round begins later")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="default: all that the device can have")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--output", type=Path, required=True, help="a file of rounds, to which new ones are appended")
    parser.add_argument("--summary", action="store_true", help="run nothing")
    options = parser.parse_args()
    kinds = options.kinds or [kind for kind in KINDS if options.device != "cpu" or kind not in ON_A_GPU]
    if not options.summary:
        run(options.device, kinds, options.rounds, options.output, 60 * options.minutes, options.seed)
    document = add_up(read_rounds(options.output))
    sys.stdout.write(json.dumps(document, indent=1) + "\n")
    return 1 if document["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
