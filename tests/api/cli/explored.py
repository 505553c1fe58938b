"""Explorations of recorded devices, real and simulated ones, run by a worker and stored as any other."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from bexp.explorer.search.explore import explore
from bexp.storage.queue import Queue
from bexp.workers.jobs.worker import JobWorker
from bexp.workers.replay.profiler import ReplayProfiler
from tests.simulated_tables import write
from tests.workers.replay.samples import recording

TABLES = Path(__file__).parents[3] / "benchmarks" / "results" / "tables"


def replayed(queue: Queue, recorded: Path, **changes: Any) -> str:
    """Explore a recording to the end of the search, and return the exploration's id."""
    profiler = ReplayProfiler(recorded)
    job, _ = queue.enqueue(profiler.recording.header.request.model_copy(update=changes))
    JobWorker(queue, profiler, "replay", explore=partial(explore, clock=profiler.clock)).run(max_jobs=1)
    return job.id


def explored(queue: Queue, folder: Path, seed: int = 1, **changes: Any) -> str:
    """Record a simulated device of this seed for a request and explore it."""
    path = folder / f"device-{seed}.jsonl"
    write(recording(seed, 1.0, **changes), path)
    return replayed(queue, path)
