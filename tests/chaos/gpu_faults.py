"""Faults of a device while real jobs run on it: `python -m tests.chaos.gpu_faults --device cuda:0 --output FILE`.

Each round is a job with one fault. Its trial must end as the fault says, the next trial must be clean, nothing that
failed may be recommended, the job must succeed, and the device's memory must come back. Rounds are appended to FILE as
lines of JSON, so that a later call goes on; with `--summary` a call only adds up what FILE has.

Several devices (`--device cuda:0 cuda:1`) run rounds side by side, each with a worker of its own. A device runs one
round at a time, and nothing else, because other work on it would count as another process there. With `--lanes 5`, the
last device has five workers. Their rounds are of the faults that touch no other process, and their profilers do not
look for other processes. Its memory must stay below what five profilers need, and be free again when they have ended.

Profiler processes are forks of one that has imported torch; a share of them is started by the interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

from bexp.explorer.dimensions.bta_tile import BTASpec
from bexp.explorer.records.measurement import Outcome
from bexp.explorer.records.trial import Trial, TrialKind
from bexp.explorer.request.request import Budget, ExplorationRequest
from bexp.explorer.search.explore import explore
from bexp.storage.database import Database, open_database
from bexp.storage.jobs import Job, JobState, get_job, get_summary
from bexp.storage.queue import Queue
from bexp.storage.queue_settings import QueueSettings
from bexp.storage.schema import upgrade
from bexp.storage.trials import read_all_trials
from bexp.workers.devices.discovery import open_gpu
from bexp.workers.jobs.worker import JobWorker
from bexp.workers.process.profiler import Profiler
from tests.chaos.faulty_profiler import SHARED_VARIABLE, VARIABLE
from tests.chaos.forked_profilers import Starts, faulty_profilers
from tests.chaos.gpu_rounds import Round, add_up, append_round, next_kind, read_rounds
from tests.chaos.gpu_tenant import HOLDS
from tests.chaos.result import read_commit
from tests.chaos.searches import SMALL_MODEL

JOB_SECONDS = {"cpu": 240.0, "cuda": 60.0}
"""After this time without an end, a job is stuck."""

SETTLE_SECONDS = 5.0
TOLERATED_BYTES = 512 << 20
"""What libraries may keep on the device after a job, beyond what they kept after the first."""

LANE_BYTES = 2 << 30
"""What a profiler may hold while other lanes run: its context and libraries take 1.4 GiB of an H100."""

TRIAL_SECONDS = {"cpu": 8.0, "cuda": 4.0}
HANG_SECONDS = {"cpu": 8.0, "cuda": 1.5}
"""What a trial may take in a job that hangs once; each of its healthy trials takes a part of that."""
SHARED_SECONDS = {"cpu": 30.0, "cuda": 4.0}
"""How long a job searches while another process comes to the device."""
ALLOWANCE_SECONDS = {"cpu": 4.0, "cuda": 2.5}
PHASES = ("start", "open", "begin", "build", "warm_up", "timed", "settle", "reply")
CALM_KINDS = ("cancel", "foreign_process")
BEFORE_TRIALS = {"kill_start", "kill_open", "kill_begin"}
KILLS = tuple(f"kill_{phase}" for phase in PHASES)
TWICE = "kill_twice"
EXPECTED = {
    "out_of_memory": Outcome.OUT_OF_MEMORY,
    "illegal_access": Outcome.CRASHED,
    "hang": Outcome.TIMED_OUT,
    "lost_device": Outcome.CRASHED,
    TWICE: Outcome.CRASHED,
}
"""How a trial ends that a fault strikes. One that is killed once runs again, and is well."""
ON_A_GPU = ("leak", "lost_device", "foreign_process")
ALONE = ("foreign_process", "leak", "out_of_memory", "hang")
"""What touches other processes on the device, or depends on them. A hang takes the device's time from them."""

KINDS = (*EXPECTED, *KILLS, "leak", *CALM_KINDS)


class Bench:
    """A queue and a worker on one device, whose profiler processes do what a file tells them to."""

    def __init__(
        self, device: str, folder: Path, log: Path, rng: Random, cold_share: float, num_lanes: int = 1
    ) -> None:
        self.device = device
        self.kind = device.partition(":")[0]
        self.rng = rng
        self.fault_file = folder / "fault.json"
        self.database: Database = open_database(f"sqlite:///{folder / 'bexp.db'}")
        upgrade(self.database)
        self.queue = Queue(self.database, QueueSettings(retry_pause=timedelta(seconds=0.2)))
        environment = {**os.environ, VARIABLE: str(self.fault_file), "OMP_NUM_THREADS": "1"}
        environment |= {SHARED_VARIABLE: "1"} if num_lanes > 1 else {}
        self.num_lanes = num_lanes
        self._log = log.open("ab")
        self.starts = Starts(environment, self._log, cold_share, rng)
        self._gpu = None if device == "cpu" else open_gpu(device, environment)
        self.limit_bytes: int | None = None
        self.profiler = Profiler(
            device, environment=environment, setup_allowance_seconds=ALLOWANCE_SECONDS[self.kind], lock_directory=folder
        )

    def start(self) -> None:
        """Start the worker, and let a job run without a fault. No more memory should be used later than after it."""
        self._start_worker()
        job = self.await_end(self.submit())
        assert job.state is JobState.SUCCEEDED, f"without a fault: {job.state}, {job.error}"
        if (used := self.used_bytes()) is not None:
            self.limit_bytes = used + TOLERATED_BYTES if self.num_lanes == 1 else self.num_lanes * LANE_BYTES

    def close(self) -> None:
        """End the worker."""
        self._worker.stop()
        self._thread.join(60)
        self.starts.end()
        self._log.close()
        self.database.dispose()

    def has_lost_its_worker(self) -> bool:
        """Whether the worker has ended, which none of the faults may cause. If so, another one is started."""
        if self._thread.is_alive():
            return False
        self._start_worker()
        return True

    def _start_worker(self) -> None:
        self._worker = JobWorker(self.queue, self.profiler, self.device, explore=explore, max_poll_seconds=0.1)
        self._thread = threading.Thread(target=self._worker.run, name="worker", daemon=True)
        self._thread.start()

    def used_bytes(self) -> int | None:
        """Return the bytes that all processes hold of the device."""
        return None if self._gpu is None else self._gpu.used_bytes()

    def submit(self, **changes: Any) -> str:
        """Queue a small job; return its id."""
        fields: dict[str, Any] = {
            "model": SMALL_MODEL,
            "micro_batch_size": (1, 2, 4, 8),
            "bta": BTASpec(enable=False),
            "attention_backends": ("math",),
            "verify": False,
            "fresh": True,
            "seed": self.rng.randrange(1 << 30),
            "budget": self.budget(),
        }
        return self.queue.enqueue(ExplorationRequest(**(fields | changes)))[0].id

    def budget(self, **changes: float) -> Budget:
        """Return a budget whose trials may take as long as healthy ones need on this kind of device."""
        timeout = TRIAL_SECONDS[self.kind] * self.num_lanes
        usual = {"max_seconds": JOB_SECONDS[self.kind] / 2, "trial_timeout_seconds": timeout}
        return Budget(**({"max_trials": 7, "confidence_target": 99} | usual | changes))

    def await_end(self, job_id: str) -> Job:
        """Return the job when it has ended, or as it is when it is stuck, which then is cancelled."""

        def has_ended() -> bool:
            return get_summary(self.database, job_id).state.is_final or not self._thread.is_alive()

        self.await_that(has_ended, JOB_SECONDS[self.kind])
        job = get_job(self.database, job_id)
        if not job.state.is_final:
            self.queue.request_cancel(job_id)
        return job

    def await_trial(self, job_id: str) -> None:
        """Wait for the first trial of a job."""
        self.await_that(lambda: len(read_all_trials(self.database, job_id)) > 0, JOB_SECONDS[self.kind])

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
    done = Round(kind, read_commit(), bench.device, lanes=bench.num_lanes)
    started = time.monotonic()
    if kind == "cancel":
        _cancel(bench, done)
    elif kind == "foreign_process":
        _share(bench, done)
    else:
        _hurt(bench, done)
    _check_memory(bench, done)
    if bench.has_lost_its_worker():
        done.violations.append("the worker has ended")
    done.seconds = round(time.monotonic() - started, 2)
    return done


def _hurt(bench: Bench, done: Round) -> None:
    place = done.kind.removeprefix("kill_") if done.kind in KILLS else "component"
    kind = "kill" if done.kind.startswith("kill_") else done.kind
    trials = passes = 0
    if done.kind not in BEFORE_TRIALS:
        trials = bench.rng.randrange(4)
        if done.kind in EXPECTED:  # the job goes on without its trial, which the first ones do not allow
            trials = max(trials, 2)  # the base, and its like with the attention of all other candidates
        passes = 0 if place in {"settle", "reply"} or done.kind == TWICE else bench.rng.randrange(3)
    told = {"kind": kind, "place": place, "trials": trials, "passes": passes, "times": 2 if done.kind == TWICE else 1}
    bench.fault_file.write_text(json.dumps(told))
    if done.kind in {"kill_start", "kill_open"} and (pid := bench.profiler.pid) is not None:
        os.kill(pid, signal.SIGKILL)  # the process is started again, and the fault strikes that one
    shorter = {"trial_timeout_seconds": HANG_SECONDS[bench.kind]} if kind == "hang" else {}
    job = bench.await_end(bench.submit(budget=bench.budget(**shorter)))
    done.struck = not bench.fault_file.exists()
    bench.fault_file.unlink(missing_ok=True)
    found = read_all_trials(bench.database, job.id)
    _check_job(done, job, found)
    for before, after in pairwise(trial.measurement for trial in found):
        if before.outcome is not Outcome.OK and after.contamination is not None:
            done.violations.append(f"the next trial is not clean: {after.contamination}")
    expected = EXPECTED.get(done.kind)
    failed = [trial for trial in found if trial.measurement.outcome is not Outcome.OK]
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


def _cancel(bench: Bench, done: Round) -> None:
    job_id = bench.submit(micro_batch_size="explore", bta=BTASpec(), attention_backends=None)
    bench.await_trial(job_id)
    time.sleep(bench.rng.uniform(0.0, 1.0))
    begin = time.monotonic()
    done.struck = not bench.queue.request_cancel(job_id).state.is_final
    job = bench.await_end(job_id)
    if done.struck:
        done.cancel_seconds = round(time.monotonic() - begin, 3)
        if job.state is not JobState.CANCELLED:
            done.violations.append(f"a cancelled job is {job.state}")


def _share(bench: Bench, done: Round) -> None:
    budget = bench.budget(max_trials=200, max_seconds=SHARED_SECONDS[bench.kind])
    job_id = bench.submit(micro_batch_size="explore", bta=BTASpec(), attention_backends=None, budget=budget)
    bench.await_trial(job_id)
    with _tenant(bench):
        num_before = len(read_all_trials(bench.database, job_id))
        job = bench.await_end(job_id)
    trials = read_all_trials(bench.database, job_id)
    _check_job(done, job, trials)
    done.struck = len(trials) > num_before + 1  # else the job was over too soon
    if done.struck and all(trial.measurement.contamination is None for trial in trials):
        done.violations.append("no trial says that the device was shared")
    after = read_all_trials(bench.database, bench.await_end(bench.submit(budget=bench.budget(max_trials=3))).id)
    if any(trial.measurement.contamination is not None for trial in after):
        done.violations.append("a trial after the other process is said to share the device")


@contextmanager
def _tenant(bench: Bench) -> Iterator[None]:
    """Have another process hold some of the device's memory."""
    process = bench.starts.start_other("tests.chaos.gpu_tenant", bench.device)
    try:
        assert process.stdout.readline() == HOLDS
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _check_memory(bench: Bench, done: Round) -> None:
    if bench.limit_bytes is None:
        return
    done.used_bytes = bench.await_memory(bench.limit_bytes)
    if done.used_bytes is not None and done.used_bytes > bench.limit_bytes:
        done.violations.append(f"{(done.used_bytes - bench.limit_bytes) >> 20} MiB too much of the device are in use")


def run(device: str, options: argparse.Namespace, lane: int = 0, num_lanes: int = 1) -> None:
    """Append rounds to the output until there is no next kind or the time is over."""
    ends_at = time.monotonic() + 60 * options.minutes
    kinds = options.kinds or [kind for kind in KINDS if device != "cpu" or kind not in ON_A_GPU]
    alone = [kind for kind in kinds if kind in ALONE]
    others = [kind for kind in kinds if kind not in ALONE]
    others = others[lane * len(others) // num_lanes :] + others[: lane * len(others) // num_lanes]
    orders = [others] if num_lanes > 1 else [alone, others] if options.lanes > 1 else [kinds]
    rng = Random(f"{options.seed} {device} {lane}")
    with tempfile.TemporaryDirectory(prefix="bexp-gpu-faults-", ignore_cleanup_errors=True) as name:
        log = options.output.with_suffix(".log")
        bench = Bench(device, Path(name), log, rng, options.cold_share, num_lanes)
        with faulty_profilers(bench.starts):
            try:
                bench.start()
                while time.monotonic() < ends_at:
                    done = read_rounds(options.output)
                    if (kind := next(filter(None, (next_kind(o, done, options.rounds) for o in orders)), None)) is None:
                        break
                    append_round(options.output, run_round(bench, kind))
            finally:
                bench.close()


def run_side_by_side(options: argparse.Namespace) -> None:
    """Run rounds on each device, all at the same time, and in several lanes on the last one."""
    devices, last = options.device, options.device[-1]
    gpu = None if last == "cpu" else open_gpu(last, os.environ)
    free_again = ((gpu and gpu.used_bytes()) or 0) + TOLERATED_BYTES
    lanes = [(device, options, 0, 1) for device in devices[:-1]]
    lanes += [(last, options, lane, options.lanes) for lane in range(options.lanes)]
    processes = [get_context("spawn").Process(target=run, args=lane) for lane in lanes]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    used = None if gpu is None else gpu.used_bytes()
    if used is not None and options.lanes > 1:
        end = Round("end_of_lanes", read_commit(), last, used_bytes=used, lanes=options.lanes)
        if used > free_again:
            end.violations.append(f"{(used - free_again) >> 20} MiB of the device are not free again")
        append_round(options.output, end)


def main() -> int:
    """Run rounds, print their sum, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.gpu_faults", description=__doc__)
    parser.add_argument("--device", default=["cuda:0"], nargs="+")
    parser.add_argument("--lanes", type=int, default=1, help="of the last device")
    parser.add_argument("--rounds", type=int, default=20, help="of each kind")
    parser.add_argument("--minutes", type=float, default=9.0, help="no round begins later")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="default: all that the device can have")
    parser.add_argument("--cold-share", type=float, default=0.05, help="of the profilers that the interpreter starts")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--output", type=Path, required=True, help="a file of rounds, to which new ones are appended")
    parser.add_argument("--summary", action="store_true", help="run nothing")
    options = parser.parse_args()
    if not options.summary:
        run_side_by_side(options)
    document = add_up(read_rounds(options.output))
    sys.stdout.write(json.dumps(document, indent=1) + "\n")
    return 1 if document["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
