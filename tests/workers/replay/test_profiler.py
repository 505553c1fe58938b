from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bexp.explorer.records.event import EventCode, Progress
from bexp.explorer.records.measurement import Outcome, PhaseSeconds
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.explore import explore
from bexp.storage.database import Database
from bexp.storage.events import read_events
from bexp.storage.jobs import Job, JobState, get_job
from bexp.storage.queue import Queue
from bexp.storage.trials import read_trials
from bexp.workers.jobs.runner import JobEnd, run_job
from bexp.workers.jobs.worker import JobWorker
from bexp.workers.process.interface import ProfilerInterruptedError
from bexp.workers.replay.profiler import RecordedDevice, ReplayProfiler, VirtualClock, mismatch
from bexp.workers.replay.recording import Recording, WholeModelRow
from bexp.workers.serving import AnswerableJobs
from tests.contracts.samples import make_worker
from tests.simulated_tables import write
from tests.workers.replay.samples import MODEL, empty, figures, plan, recording, request, row, table_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "table.jsonl"
    write(recording(whole_model_share=1.0), file)
    return file


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": MODEL | {"num_layers": 8}}, "another model, with num_layers 4 instead of 8"),
        ({"model": MODEL | {"seq_length": 4096}}, "seq_length 2048 instead of 4096"),
        ({"execution": "compile"}, "recorded with execution eager, not compile"),
        ({"mode": "eval", "recompute": ["none"]}, "recorded with mode train, not eval"),
        ({"training": {"loss": {"kind": "full"}}}, "recorded with training {}, not .*full"),
        ({"micro_batch_size": [2, 3, 16]}, "lacks components of the micro-batch sizes 3"),
        (
            {"num_devices": 4, "training": {"sharding": "explore"}},
            "recorded with one level of sharding, not a choice of sharding among none, zero1, zero2, zero3",
        ),
    ],
)
def test_a_job_that_the_table_cannot_answer_is_told_why(changes: dict[str, Any], message: str, path: Path) -> None:
    asked = request(**changes)
    profiler = ReplayProfiler(path)
    report = profiler.begin(asked)
    steps = list(explore(asked, report, profiler.measure))
    assert steps[-1].answer is not None
    (variant,) = steps[-1].answer.variants
    assert variant.recommendation is None
    assert variant.reason is not None
    assert re.search(message, variant.reason)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": MODEL | {"name": "other"}},
        {"memory_limit_gib": 16},
        {"micro_batch_size": [2, 4]},
        {"recompute": ["full"]},
        {"seed": 7, "tolerance": 0.05, "batch_size": 128},
    ],
)
def test_a_job_may_differ_in_what_no_measurement_depends_on(changes: dict[str, Any]) -> None:
    assert mismatch(request(**changes), recording()) is None


def test_what_a_table_of_several_levels_of_sharding_answers() -> None:
    def choosing(levels: Any, num_devices: int = 4) -> ExplorationRequest:
        return request(num_devices=num_devices, training={"sharding": levels})

    table = recording()
    header = table.header.model_copy(update={"request": choosing(["none", "zero3"])})
    table = Recording(header, [row for rows in table.components.values() for row in rows])
    assert "among none, zero3, not one level" in str(
        mismatch(choosing("zero3").model_copy(update={"training": header.request.training}), table)
    )
    assert "among none, zero3, not a choice of sharding among zero2" in str(mismatch(choosing(["zero2"]), table))
    assert "training on 4 devices, not 8" in str(mismatch(choosing(["zero3"], 8), table))
    for levels in (["zero3", "none"], ["none"], ["zero3"]):
        assert "recorded with" not in str(mismatch(choosing(levels), table))


def test_the_device_says_that_it_is_replayed(path: Path) -> None:
    hardware = ReplayProfiler(path).hardware()
    assert hardware.device_name == "simulated H200, replayed"
    assert hardware.fingerprint != recording().header.report.hardware.fingerprint


def test_an_interrupted_replay_stays_so_until_it_is_started(path: Path) -> None:
    profiler = ReplayProfiler(path)
    profiler.interrupt()
    with pytest.raises(ProfilerInterruptedError):
        profiler.begin(request())
    profiler.start()
    profiler.begin(request())


def enqueue(database: Database, asked: ExplorationRequest) -> tuple[Queue, Job]:
    queue = Queue(database)
    return queue, queue.enqueue(asked)[0]


def replay_job(queue: Queue, path: Path, *, stop_after: int | None = None, cancel: bool = False) -> JobEnd:
    """One lease of the next job, put back or cancelled after `stop_after` trials."""
    profiler = ReplayProfiler(path)
    hardware = profiler.hardware()
    claim = queue.claim(
        make_worker(
            device_kind=hardware.device_kind,
            num_devices=hardware.num_devices,
            fingerprint=hardware.fingerprint,
            memory_bytes=hardware.most_memory_bytes,
        )
    )
    assert claim is not None
    stopping = threading.Event()

    def search(*arguments: Any, **named: Any) -> Any:
        return limited(explore(*arguments, **named, clock=profiler.clock), stop_after, stop)

    def stop() -> None:
        if cancel:
            queue.request_cancel(claim.job.id)
        stopping.set()

    return run_job(claim, queue, profiler, stopping=stopping, explore=search)


def limited(steps: Any, stop_after: int | None, stop: Callable[[], None]) -> Any:
    number = 0
    step: Progress
    for step in steps:
        yield step
        number += step.trial is not None
        if number == stop_after:
            stop()


def test_a_job_that_is_put_back_goes_on_as_it_would_have_gone(sqlite_database: Database, path: Path) -> None:
    queue, whole = enqueue(sqlite_database, request())
    assert replay_job(queue, path) is JobEnd.SUCCEEDED
    _, cut = enqueue(sqlite_database, request(fresh=True))
    assert replay_job(queue, path, stop_after=3) is JobEnd.RELEASED
    assert len(read_trials(sqlite_database, cut.id)) == 3
    assert replay_job(queue, path) is JobEnd.SUCCEEDED
    measured = [[s.trial.measurement for s in read_trials(sqlite_database, job.id)] for job in (whole, cut)]
    assert measured[0] == measured[1]
    answers = [get_job(sqlite_database, job.id).answer for job in (whole, cut)]
    assert answers[0] is not None and answers[1] is not None
    assert answers[0].recommendation == answers[1].recommendation


def test_the_next_job_starts_from_what_the_first_has_measured(sqlite_database: Database, path: Path) -> None:
    queue, first = enqueue(sqlite_database, request())
    assert replay_job(queue, path) is JobEnd.SUCCEEDED
    _, second = enqueue(sqlite_database, request(batch_size=256))
    assert replay_job(queue, path, stop_after=1) is JobEnd.RELEASED
    assert replay_job(queue, path) is JobEnd.SUCCEEDED
    done = get_job(sqlite_database, second.id)
    assert done.answer is not None and done.answer.recommendation is not None
    assert done.answer.recommendation.reused is not None
    assert done.answer.recommendation.reused.num_explorations == 1
    number = {job.id: len(read_trials(sqlite_database, job.id)) for job in (first, second)}
    assert number[second.id] < number[first.id]
    told = [event.code for event in read_events(sqlite_database, second.id)]
    assert told.count(EventCode.REUSED) == 1


def test_what_a_cancelled_job_has_measured_is_reused(sqlite_database: Database, path: Path) -> None:
    queue, _ = enqueue(sqlite_database, request())
    assert replay_job(queue, path, stop_after=3, cancel=True) is JobEnd.CANCELLED
    _, job = enqueue(sqlite_database, request())
    assert replay_job(queue, path, stop_after=1) is JobEnd.RELEASED
    report = get_job(sqlite_database, job.id).report
    assert report is not None
    assert report.earlier.num_explorations == 1


def test_a_worker_leaves_what_its_table_cannot_answer_to_others(sqlite_database: Database, path: Path) -> None:
    queue, other = enqueue(sqlite_database, request(model=MODEL | {"num_layers": 8}))
    _, own = enqueue(sqlite_database, request())
    profiler = ReplayProfiler(path)
    answerable = AnswerableJobs(sqlite_database, profiler.recording)
    JobWorker(queue, profiler, "replay", explore=partial(explore, clock=profiler.clock), job_ids=answerable).run(
        max_jobs=1
    )
    assert get_job(sqlite_database, own.id).state is JobState.SUCCEEDED
    assert get_job(sqlite_database, other.id).state is JobState.QUEUED
    assert list(answerable) == []


def test_a_worker_serves_a_table(sqlite_database: Database, path: Path) -> None:
    queue, job = enqueue(sqlite_database, request())
    profiler = ReplayProfiler(path)
    JobWorker(queue, profiler, "replay", explore=partial(explore, clock=profiler.clock)).run(max_jobs=1)
    done = get_job(sqlite_database, job.id)
    assert done.state is JobState.SUCCEEDED
    assert done.answer is not None and done.answer.recommendation is not None
    assert done.answer.recommendation.whole_model is not None
    assert done.answer.recommendation.candidate in table_of(profiler.recording).row
    assert done.report is not None
    assert done.report.hardware.device_name.endswith("replayed")
    trials = read_trials(sqlite_database, job.id)
    assert sum(stored.trial.seconds for stored in trials) > 1.0  # as recorded, not as it took here


TABLES = Path(__file__).parents[3] / "benchmarks" / "results" / "tables"


@pytest.mark.parametrize(
    ("name", "num_candidates", "num_components", "digest"),
    [
        ("gpt2-124m", 42, 72, "2a4099c968c1"),
        ("cerebras-gpt-24gib", 118, 106, "30d41a8ed34b"),
        ("whole-moe-16-experts", 48, 86, "2c886e46c4e5"),
    ],
)
def test_the_space_of_a_recording_stays(name: str, num_candidates: int, num_components: int, digest: str) -> None:
    recording = Recording.read(TABLES / f"{name}.jsonl")
    request = recording.header.request
    assert request.devices.context_parallel_sizes == (1,)
    found = recording.prune(request, request.shapes)
    told = "\n".join(candidate.describe() for candidate in found.legal.candidates)
    assert hashlib.sha256(told.encode()).hexdigest()[:12] == digest, "other candidates, or another order"
    assert len(found.legal.candidates) == num_candidates
    assert found.table is not None
    assert len(found.table.components) == num_components
    assert set(recording.components) & set(found.table.components)


def test_answers_have_the_spread_of_the_recorded_runs() -> None:
    recorded = empty()
    component = table_of(recorded).components[0]
    runs = [0.010, 0.011, 0.012]
    for run, seconds in enumerate(runs):
        recorded.add(row(component, run, seconds))
    drawn = [RecordedDevice(recorded, seed=seed).draw(component) for seed in range(600)]
    logs = np.log([d.figures.device_seconds for d in drawn if d is not None and d.figures is not None])
    assert np.mean(logs) == pytest.approx(np.mean(np.log(runs)), abs=0.01)
    assert np.std(logs) == pytest.approx(np.std(np.log(runs), ddof=1), rel=0.1)


def test_a_single_run_is_moved_by_its_standard_error() -> None:
    recorded = empty()
    component = table_of(recorded).components[0]
    recorded.add(row(component).model_copy(update={"figures": figures(0.01, error=0.0005)}))
    drawn = [RecordedDevice(recorded, seed=seed).draw(component) for seed in range(600)]
    logs = np.log([d.figures.device_seconds for d in drawn if d is not None and d.figures is not None])
    assert np.std(logs) == pytest.approx(0.05, rel=0.15)


def test_answers_depend_on_the_seed_and_not_on_the_order() -> None:
    recorded = recording()
    table = table_of(recorded)
    model, candidate, components = table.model, table.candidates[0], table.components[:6]
    together = RecordedDevice(recorded, seed=3)(plan(model, candidate, components))
    apart = RecordedDevice(recorded, seed=3)
    answers = [apart(plan(model, candidate, (c,))).components[0] for c in reversed(components)]
    assert tuple(reversed(answers)) == together.components
    assert RecordedDevice(recorded, seed=4)(plan(model, candidate, components)).components != together.components


def test_a_component_that_is_measured_again_is_drawn_again_by_the_trials_number() -> None:
    recorded = empty()
    table = table_of(recorded)
    component = table.components[0]
    for run in range(40):
        recorded.add(row(component, run, 0.01 + 1e-5 * run))

    def answer(number: int, *, again: bool) -> float:
        asked = plan(table.model, table.candidates[0], (component,), number).model_copy(update={"again": again})
        return RecordedDevice(recorded, seed=3)(asked).components[0].device_seconds

    assert answer(0, again=False) == answer(5, again=False)
    assert answer(5, again=True) == answer(5, again=True)
    assert len({answer(number, again=True) for number in range(8)}) > 4


def test_a_block_that_waits_for_its_device_keeps_one_time() -> None:
    recorded = empty()
    component = table_of(recorded).components[0]
    for run, seconds in enumerate((0.01, 0.02)):
        waits = figures(seconds, host=seconds)
        recorded.add(row(component, run).model_copy(update={"figures": waits}))
    found = RecordedDevice(recorded, seed=0).draw(component)
    assert found is not None and found.figures is not None
    assert found.figures.host_seconds == found.figures.device_seconds


def test_a_failed_component_ends_the_trial_and_keeps_what_came_before() -> None:
    recorded = empty()
    table = table_of(recorded)
    first, second, third = table.components[:3]
    phases = PhaseSeconds(timed=1.0, messaging=0.1)
    recorded.add(row(first, phases=phases))
    recorded.add(row(second, outcome=Outcome.OUT_OF_MEMORY, reason="too large", phases=phases))
    recorded.add(row(third, phases=phases))
    clock = VirtualClock()
    found = RecordedDevice(recorded, seed=0, clock=clock)(
        plan(table.model, table.candidates[0], (first, second, third))
    )
    assert (found.outcome, found.reason, found.failed_component) == (Outcome.OUT_OF_MEMORY, "too large", second)
    assert [m.component for m in found.components] == [first]
    assert clock() == pytest.approx(2.1)


def test_a_process_that_did_not_survive_is_paid_for_in_the_next_trial() -> None:
    recorded = empty()
    table = table_of(recorded)
    first, second = table.components[:2]
    recorded.add(row(first, outcome=Outcome.CRASHED, reason="illegal access", replaced=True))
    recorded.add(row(second))
    device = RecordedDevice(recorded, seed=0)
    crash = device(plan(table.model, table.candidates[0], (first,)))
    after = [device(plan(table.model, table.candidates[0], (second,))) for _ in range(2)]
    assert [m.phases.process_start for m in (crash, *after)] == [0.0, 5.0, 0.0]
    assert device.replacements == 1
    assert device.clock() == 5.0


def test_what_was_never_recorded_is_unsupported_and_says_so() -> None:
    recorded = empty()
    table = table_of(recorded)
    device = RecordedDevice(recorded, seed=0)
    found = device(plan(table.model, table.candidates[0], table.components[:1]))
    assert (found.outcome, found.reason) == (Outcome.UNSUPPORTED, "never recorded")
    whole = device(plan(table.model, table.candidates[0]))
    assert (whole.outcome, whole.reason) == (Outcome.UNSUPPORTED, "the recorded table has no run of its whole model")


def test_a_whole_model_is_answered_as_it_was_recorded() -> None:
    recorded = recording(whole_model_share=1.0)
    table = table_of(recorded)
    candidate, rows = next((c, r) for c, r in recorded.whole_models.items() if r[0].figures is not None)
    found = RecordedDevice(recorded, seed=0)(plan(table.model, candidate))
    assert found.whole_model is not None and rows[0].figures is not None
    assert found.whole_model.micro_step_seconds == pytest.approx(rows[0].figures.micro_step_seconds, rel=0.02)
    recorded.whole_models[candidate] = [
        WholeModelRow(candidate=candidate, run=0, outcome=Outcome.OUT_OF_MEMORY, reason="full")
    ]
    assert RecordedDevice(recorded, seed=0)(plan(table.model, candidate)).outcome is Outcome.OUT_OF_MEMORY
