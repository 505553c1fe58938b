"""What commands with a worker of their own do when they are interrupted; the worker's process is left out."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from bexp.api.cli import local_run
from bexp.api.cli.local_run import LocalRun
from bexp.api.local_worker import WorkerEndedError
from bexp.explorer.request.request import ExplorationRequest
from bexp.storage.jobs import JobState, get_job, list_jobs
from bexp.storage.queue import Queue
from bexp.storage.workers import register_worker
from tests.api.cli.conftest import Run
from tests.api.cli.samples import REQUEST, TINY
from tests.contracts.jobs import expire, store
from tests.contracts.samples import make_worker

CEREBRAS = Path(__file__).parents[3] / "examples" / "cerebras-runconfig.yaml"
pytestmark = pytest.mark.parametrize("bexp", ["database"], indirect=True)


class Interrupting:
    """A worker that stands for Ctrl-C in the terminal, as soon as nothing comes from it."""

    has_ended = False

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def check(self) -> bool:
        raise KeyboardInterrupt

    def stop(self, **_: Any) -> None: ...


@pytest.fixture(autouse=True)
def _interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_run, "LocalWorker", Interrupting)


@pytest.mark.parametrize(
    ("document", "options", "folder"),
    [
        (TINY, (), None),
        (TINY, ("--log-dir", "logs"), "logs"),
        (yaml.safe_load(CEREBRAS.read_text()), (), "."),
        (yaml.safe_load(CEREBRAS.read_text()), ("--log-dir", "logs"), "logs"),
    ],
    ids=["none", "named", "cerebras", "cerebras-named"],
)
def test_an_interrupted_exploration_is_cancelled_and_only_a_cerebras_log_is_kept_without_asking(
    bexp: Run, queue: Queue, tmp_path: Path, document: dict[str, Any], options: tuple[str, ...], folder: str | None
) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(document))
    done = bexp("explore", "config.yaml", "--device", "cpu", *options)
    job = list_jobs(queue.database)[0][0]
    assert (done.code, job.state) == (130, JobState.CANCELLED)
    assert f"`bexp resume {job.id} --device cpu` continues it" in done.stderr
    logs = list(tmp_path.rglob("run_*.log"))
    assert logs == ([] if folder is None else [*(tmp_path / folder / "local_compile_train").rglob(f"run_{job.id}.log")])
    assert len(logs) == (folder is not None)


def test_an_interrupted_resume_leaves_what_another_worker_runs(bexp: Run, queue: Queue) -> None:
    job, _ = queue.enqueue(REQUEST)
    other = make_worker("other-1-cpu", host="other")
    register_worker(queue.database, other)
    claim = queue.claim(other)
    assert claim is not None
    done = bexp("resume", job.id, "--device", "cpu")
    assert done.code == 130
    assert f"exploration {job.id} goes on: another worker runs it" in done.stderr
    assert "it runs already, or its worker has died" in done.stderr
    assert not get_job(queue.database, job.id).cancel_requested
    queue.finish(claim.lease, JobState.CANCELLED)  # the command's thread follows it until then


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("queued", JobState.QUEUED),
        ("abandoned", JobState.RUNNING),
        ("another command's", JobState.CANCELLED),
        ("cancelled", JobState.CANCELLED),
    ],
)
def test_a_resume_whose_worker_fails_gives_back_what_waited_for_any_worker(
    bexp: Run, queue: Queue, monkeypatch: pytest.MonkeyPatch, before: str, after: JobState
) -> None:
    job, _ = queue.enqueue(REQUEST, own_worker="gone" if before == "another command's" else "")
    if before == "abandoned":
        assert queue.claim(make_worker("w"), among=[job.id]) is not None
        expire(queue.database, job.id)
    if before == "cancelled":
        queue.request_cancel(job.id)
    store(queue.database, job.id, own_worker_until=None)

    def refuse(_: Interrupting) -> bool:
        raise WorkerEndedError("the worker cannot run this exploration", 3)

    monkeypatch.setattr(Interrupting, "check", refuse)
    done = bexp("resume", job.id, "--device", "cpu")
    assert (done.code, "the worker cannot run this exploration" in done.stderr) == (3, True)
    is_shared = after is not JobState.CANCELLED
    assert (f"exploration {job.id} waits for any worker again" in done.stderr) == is_shared
    stored = get_job(queue.database, job.id)
    assert (stored.state, stored.own_worker == "", stored.cancel_requested) == (after, is_shared, False)


@pytest.mark.parametrize("state", [JobState.QUEUED, JobState.CANCELLED, JobState.FAILED, JobState.SUCCEEDED])
def test_all_but_what_has_succeeded_is_resumed(bexp: Run, queue: Queue, state: JobState) -> None:
    job, _ = queue.enqueue(REQUEST)
    if state is not JobState.QUEUED:
        claim = queue.claim(make_worker("w"), among=[job.id])
        assert claim is not None
        queue.finish(claim.lease, state)
    done = bexp("resume", job.id, "--device", "cpu")
    if state is JobState.SUCCEEDED:
        said = f"bexp: exploration {job.id} has succeeded: `bexp best {job.id}` prints its answer\n"
        assert (done.code, done.stderr) == (2, said)
        return
    assert (done.code, "it runs already" in done.stderr) == (130, False)
    assert f"cancelling exploration {job.id}" in done.stderr
    assert get_job(queue.database, job.id).state is JobState.CANCELLED


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"device_kind": "cuda"}, "the exploration needs a cuda device, and --device names cpu"),
        ({"target": "elsewhere"}, "there is no target 'elsewhere' here"),
    ],
)
def test_a_resume_leaves_what_no_worker_here_can_run(
    bexp: Run, queue: Queue, fields: dict[str, Any], said: str
) -> None:
    job, _ = queue.enqueue(ExplorationRequest.model_validate(TINY | fields))
    done = bexp("resume", job.id, "--device", "cpu")
    assert (done.code, said in done.stderr) == (2, True)
    stored = get_job(queue.database, job.id)
    assert (stored.state, stored.cancel_requested) == (JobState.QUEUED, False)


@pytest.mark.parametrize(
    ("fields", "device", "target", "options", "again"),
    [
        ({}, None, None, ["--num-devices", "1"], ""),
        ({"device_kind": "cuda"}, None, None, ["--device", "cuda"], ""),
        ({"device_kind": "cpu", "num_devices": 2}, None, None, ["--device", "cpu", "--group"], ""),
        ({"device_kind": "cuda", "num_devices": 2}, None, None, ["--num-devices", "1,2", "--group"], ""),
        ({"num_devices": 2}, "cuda:0-1", "t.py:T", ["--device", "cuda:0-1", "--group"], " --target t.py:T"),
    ],
)
def test_a_worker_owns_what_it_is_told_or_as_many_devices_as_can_be_used(
    bexp: Run,
    queue: Queue,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    device: str | None,
    target: str | None,
    options: list[str],
    again: str,
) -> None:
    given: list[Any] = []
    Path("t.py").touch()
    monkeypatch.setattr(local_run, "check_devices", lambda _: None)
    monkeypatch.setattr(Interrupting, "__init__", lambda _, *known, **named: given.extend((*known, named)))
    run = LocalRun(ExplorationRequest.model_validate(TINY | fields), "job", device, target)
    with run:
        environment = {} if target is None else {"BEXP_LOCAL_TARGET": str(Path(target).absolute())}
        named = {"database_url": queue.database.url, "more_environment": environment}
        assert given == ["job", run.worker_name, options, named]
    assert run._again == f"bexp resume job{'' if device is None else f' --device {device}'}{again}"


@pytest.mark.parametrize(
    ("state", "owner", "is_told"),
    [("queued", "own", True), ("running", "own", True), ("queued", "", False), ("succeeded", "own", False)],
)
def test_a_worker_that_was_told_to_end_before_its_exploration_ends_the_command(
    bexp: Run, monkeypatch: pytest.MonkeyPatch, state: str, owner: str, is_told: bool
) -> None:
    """Nobody else would ever take the exploration."""
    monkeypatch.setattr(Interrupting, "check", lambda _: False)
    monkeypatch.setattr(local_run, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(local_run, "new_worker_name", lambda: "own")
    job = SimpleNamespace(state=JobState(state), own_worker=owner, waiting_reason=None)
    stored: Any = SimpleNamespace(summary=lambda _: job)
    with LocalRun(REQUEST, "job", "cpu") as run, nullcontext() if not is_told else pytest.raises(WorkerEndedError):
        for _ in range(2):
            run.check(stored)


@pytest.mark.parametrize("ends_after", [1.0, 3600.0])
def test_a_cancelled_exploration_is_awaited_for_some_seconds(
    bexp: Run, monkeypatch: pytest.MonkeyPatch, ends_after: float
) -> None:
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(local_run, "time", clock)

    def look(_: str, **__: object) -> SimpleNamespace:
        return SimpleNamespace(is_final=clock.now >= ends_after, cancel_requested=True)

    with LocalRun(REQUEST, "job", "cpu") as run:
        run.cancel(SimpleNamespace(cancel=look, get=look))  # type: ignore[arg-type]  # all it asks
    assert clock.now == pytest.approx(min(ends_after, local_run.CANCEL_SECONDS), abs=0.2)


@pytest.mark.parametrize(
    ("reason", "state", "starts_after", "said"),
    [
        (
            None,
            "running",
            65,
            [
                "not started after 30 s: its own worker is starting",
                "not started after 60 s: its own worker is starting",
            ],
        ),
        ("no device is free", "failed", 31, ["not started after 30 s: no device is free"]),
        (None, "running", 29, []),
    ],
)
def test_a_worker_that_takes_long_is_explained_every_30_seconds(
    bexp: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    reason: str | None,
    state: str,
    starts_after: int,
    said: list[str],
) -> None:
    """The storage is asked once a second, and not any more when it has started."""
    clock, asked = SimpleNamespace(now=1000.0), []
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(local_run, "time", clock)
    monkeypatch.setattr(Interrupting, "check", lambda _: True)

    def summary(job_id: str) -> SimpleNamespace:
        asked.append(job_id)
        started = clock.now - 1000 >= starts_after
        return SimpleNamespace(state=state if started else "queued", waiting_reason=reason)

    stored: Any = SimpleNamespace(summary=summary)
    with LocalRun(REQUEST, "job", "cpu") as run:
        for _ in range(4 * 100):
            clock.now += 0.25
            run.check(stored)
    assert capsys.readouterr().err.splitlines() == said
    assert asked == ["job"] * starts_after
