"""A process that is ready and does not get through the beginning of a job."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bexp.explorer.model.base import Frozen
from bexp.explorer.records.measurement import Outcome
from bexp.workers.process import trial_run
from bexp.workers.process.child import ProfilerProcess
from bexp.workers.process.exit_status import KILLED_HINT
from bexp.workers.process.interface import ProfilerInterruptedError
from bexp.workers.process.profiler import Profiler
from bexp.workers.process.protocol import Begin
from tests.forked_profilers import forked_profilers
from tests.workers.process.profilers import ENVIRONMENT, works
from tests.workers.profiler.samples import REQUEST, candidate, components_of, plan

pytestmark = pytest.mark.slow(together="forked")

Strike = Callable[[ProfilerProcess], object]


@pytest.fixture(scope="module")
def profiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Profiler]:
    with (
        forked_profilers(),
        Profiler("cpu", environment=ENVIRONMENT, lock_directory=tmp_path_factory.mktemp("locks")) as shared,
    ):
        yield shared


@pytest.fixture
def as_jobs_begin(monkeypatch: pytest.MonkeyPatch) -> list[Strike]:
    """Takes what is done to the next processes that a job is announced to: they do nothing before that."""
    strikes: list[Strike] = []
    send = ProfilerProcess.send

    def send_and_strike(process: ProfilerProcess, command: Frozen) -> None:
        strike = strikes.pop(0) if strikes and isinstance(command, Begin) else None
        if strike is not None:
            os.kill(process.pid, signal.SIGSTOP)
        send(process, command)
        if strike is not None:
            strike(process)

    monkeypatch.setattr(ProfilerProcess, "send", send_and_strike)
    return strikes


def end_by(number: signal.Signals) -> Strike:
    def strike(process: ProfilerProcess) -> None:
        os.kill(process.pid, number)
        os.kill(process.pid, signal.SIGCONT)  # other signals than SIGKILL wait for that

    return strike


def test_one_that_hangs_twice_is_the_jobs_outcome_and_the_next_job_runs(
    profiler: Profiler, as_jobs_begin: list[Strike], pass_time: Callable[[float], None]
) -> None:
    restarts = profiler.restarts
    as_jobs_begin += [lambda _: pass_time(200.0), lambda _: pass_time(400.0)]
    report = profiler.begin(REQUEST)
    assert report.refusal == "2 processes could not prepare it: no result within 180 s"
    assert profiler.restarts == restarts + 2
    profiler.finish_job()
    assert profiler.begin(REQUEST).refusal is None
    assert works(profiler)


def test_one_that_is_killed_once_does_no_harm(profiler: Profiler, as_jobs_begin: list[Strike]) -> None:
    as_jobs_begin.append(end_by(signal.SIGKILL))
    assert profiler.begin(REQUEST).refusal is None
    assert works(profiler)


@pytest.mark.parametrize(
    ("signals", "reasons"),
    [
        ((signal.SIGKILL, signal.SIGKILL), ("was killed by SIGKILL", KILLED_HINT)),
        ((signal.SIGKILL, signal.SIGSEGV), ("was killed by SIGKILL", "was killed by SIGSEGV")),
    ],
)
def test_one_that_ends_twice_is_the_jobs_outcome(
    profiler: Profiler, as_jobs_begin: list[Strike], signals: tuple[signal.Signals, ...], reasons: tuple[str, ...]
) -> None:
    as_jobs_begin += map(end_by, signals)
    refusal = profiler.begin(REQUEST).refusal
    assert refusal is not None
    assert all(reason in refusal for reason in reasons)
    assert not as_jobs_begin


def test_one_that_takes_the_hosts_memory_is_the_jobs_outcome(
    profiler: Profiler, as_jobs_begin: list[Strike], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_run, "RESIDENT_SLACK_BYTES", -(1 << 62))
    as_jobs_begin += [lambda _: None] * 2
    assert "exceeded its memory limit" in (profiler.begin(REQUEST).refusal or "")


def test_one_of_a_replacement_is_the_trials_outcome(profiler: Profiler, as_jobs_begin: list[Strike]) -> None:
    profiler.begin(REQUEST)
    chosen = candidate(1)
    small = plan(chosen, components_of(chosen)[:1])
    for signals, outcome in (((signal.SIGKILL,), Outcome.OK), ((signal.SIGSEGV,), Outcome.CRASHED)):
        assert profiler.pid is not None
        profiler._process.end()
        as_jobs_begin += map(end_by, signals)
        result = profiler.measure(small)
        assert result.outcome is outcome
        assert f"before the trial: the profiler process was killed by {signals[-1].name}" in (result.reason or "")
    assert works(profiler)


def test_a_job_is_stopped_in_its_beginning(profiler: Profiler, as_jobs_begin: list[Strike]) -> None:
    as_jobs_begin.append(lambda _: threading.Thread(target=profiler.interrupt).start())
    with pytest.raises(ProfilerInterruptedError):
        profiler.begin(REQUEST)
    profiler.start()
    assert profiler.begin(REQUEST).refusal is None


def test_a_configuration_that_breaks_its_own_class_is_refused_by_its_process(
    profiler: Profiler, tmp_path: Path
) -> None:
    """A nested key that shadows a method of the library makes it raise what nobody expects."""
    pytest.importorskip("transformers")
    broken = {"model_type": "gemma3", "text_config": {"num_hidden_layers": 1, "get_text_config": 3, "to_dict": 4}}
    profiler.start()
    pid = profiler.pid
    report = profiler.begin(type(REQUEST).model_validate({"hf_config": broken, "hf_seq_length": 16}))
    assert "TypeError" in (report.refusal or "")
    assert profiler.pid == pid, "the process goes on"
