"""A real worker process that owns two ranks on the CPU and explores how they share sequences."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from bexp.child_process import PACKAGES_FOLDER, module_command
from bexp.explorer.dimensions.bta_tile import BTASpec
from bexp.explorer.dimensions.context_parallel import ContextParallelSpec
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.model import ModelSpec
from bexp.explorer.records.trial import TrialKind
from bexp.explorer.request.request import Budget, ExplorationRequest
from bexp.storage.database import Database
from bexp.storage.events import read_events
from bexp.storage.jobs import JobState, get_job
from bexp.storage.queue import Queue
from bexp.storage.trials import read_trials
from tests.bexp.test_child_process import write_hostile_packages
from tests.contracts.samples import make_worker
from tests.explorer.notes import notes_of
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.slow

REQUEST = ExplorationRequest(
    model=ModelSpec(
        name="tiny",
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        vocab_size=256,
        seq_length=256,
        dtype="float32",
    ),
    micro_batch_size=(1, 2),
    batch_size=8,
    num_devices=2,
    bta=BTASpec(enable=False),
    recompute=(Recompute.NONE,),
    attention_backends=("flash",),
    context_parallel=ContextParallelSpec(sizes=(2,)),
    device_kind="cpu",
    budget=Budget(confidence_target=99, max_trials=6, max_seconds=30),
)


def run_worker(database: Database, folder: Path, *options: str) -> int:
    environment = {**os.environ, "BEXP_DATABASE_URL": database.url, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(PACKAGES_FOLDER)
    command = module_command("bexp.workers", *options, "--max-jobs", "1")
    return subprocess.run(
        command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, timeout=PATIENCE_SECONDS, check=False
    ).returncode


def test_a_group_explores_how_to_share_sequences_and_recommends(sqlite_database: Database, tmp_path: Path) -> None:
    """None of its processes imports from the folder it is run in.

    Every candidate shares its sequences: were one device alone a candidate too, a slow machine could be sure
    of it before a ring was run.
    """
    imported = write_hostile_packages(tmp_path)
    queue = Queue(sqlite_database)
    job, _ = queue.enqueue(REQUEST)
    alone = queue.claim(make_worker("alone"))
    assert alone is None, "one device is too few"
    assert run_worker(sqlite_database, tmp_path, "--device", "cpu,cpu", "--group") == 0

    done = get_job(sqlite_database, job.id)
    assert done.state is JobState.SUCCEEDED, [event.message for event in read_events(sqlite_database, job.id)]
    assert done.recommendation is not None
    assert done.space is not None
    assert done.space["context_parallel_size"] == [2]
    assert done.space["context_parallel_layout"] == ["ring", "striped", "zigzag"]
    trials = [stored.trial for stored in read_trials(sqlite_database, job.id)]
    measured = {
        (m.component.context_parallel_size, m.component.context_parallel_layout)
        for trial in trials
        for m in trial.measurement.components
        if m.component.communicates
    }
    assert measured, "no ring was run"
    assert measured <= {(2, "ring"), (2, "striped"), (2, "zigzag")}
    whole = [trial for trial in trials if trial.kind is TrialKind.WHOLE_MODEL]
    assert whole, "the recommended candidate is run on both devices"
    assert whole[0].measurement.whole_model is not None, whole[0].measurement.reason
    best = done.recommendation
    groups = REQUEST.devices.data_parallel_size(best.candidate.context_parallel_size)
    assert best.grad_accum_steps == REQUEST.effective_batch_size // (best.candidate.micro_batch_size * groups)
    exchanged = [
        trial for trial in trials if any(m.component.kind == "communication" for m in trial.measurement.components)
    ]
    assert [trial.number for trial in exchanged] == [0], "measured once, before all else"
    assert whole[0].measurement.whole_model.communication_seconds is not None
    assert best.communication_seconds is not None
    assert any("exchange of gradients between 2 devices is included in the time" in note for note in notes_of(best))
    assert not imported.exists(), imported.read_text()
