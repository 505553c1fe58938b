"""A real profiler process on the CPU: what it answers, and what becomes of it in the middle of a job."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from bexp.explorer.cost.components import ComponentKind
from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.base import Frozen
from bexp.explorer.records.measurement import Measurement, Outcome
from bexp.explorer.request.request import ExplorationRequest
from bexp.workers.devices.lock import DeviceBusyError
from bexp.workers.process.child import ProfilerProcess
from bexp.workers.process.exit_status import KILLED_HINT
from bexp.workers.process.interface import ProfilerInterruptedError
from bexp.workers.process.profiler import Profiler
from bexp.workers.process.protocol import Begin, Reply, ReportReply, RunTrial
from tests.forked_profilers import forked_profilers
from tests.waits import wait_until
from tests.workers.process.conftest import Act
from tests.workers.process.profilers import (
    ENVIRONMENT,
    HUGE,
    kill_while_starting,
    measured_whole,
    slow_trial,
    works,
)
from tests.workers.profiler.samples import MODEL, REQUEST, candidate, components_of, plan, whole_model_plan

pytestmark = pytest.mark.slow(together="forked")


@pytest.fixture(scope="module")
def profiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Profiler]:
    """One process for the tests that leave it well, or replaced."""
    with (
        forked_profilers(),
        Profiler("cpu", environment=ENVIRONMENT, lock_directory=tmp_path_factory.mktemp("locks")) as shared,
    ):
        yield shared


def attention_of(m: int) -> tuple:  # type: ignore[type-arg]  # any components
    return tuple(c for c in components_of(candidate(m), HUGE) if c.kind is ComponentKind.ATTENTION)


def test_hardware_is_measured_once(profiler: Profiler) -> None:
    hardware = profiler.hardware()
    assert hardware.device_kind == "cpu"
    assert 0 < hardware.memory_limit_bytes < hardware.memory_bytes
    assert hardware.matmul_flops_per_second["float32"] > 1e8  # type: ignore[index]  # never null here
    assert hardware.versions.torch.startswith("2.")
    assert profiler.hardware() is hardware


def test_report_names_what_is_usable_and_why_the_rest_is_not(profiler: Profiler) -> None:
    report = profiler.begin(REQUEST)
    support = {backend.name: backend for backend in (*report.attention_backends, *report.expert_backends)}
    assert support["flash"].usable
    assert support["grouped_mm"].usable
    assert not support["cudnn"].usable
    assert "CUDA" in (support["cudnn"].reason or "")
    assert report.default_experts == "grouped_mm"
    assert support[report.default_attention].usable


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_every_component_is_measured(profiler: Profiler, mode: str) -> None:
    profiler.begin(REQUEST.model_copy(update={"mode": mode}))
    chosen = candidate(2)
    components = components_of(chosen, training=mode == "train")
    result = profiler.measure(plan(chosen, components))
    assert result.outcome is Outcome.OK, result.reason
    assert tuple(m.component for m in result.components) == components
    for found in result.components:
        assert found.device_seconds > 0
        assert found.repeats >= 2
        if found.component.kind is ComponentKind.OPTIMIZER:
            continue
        assert found.saved_bytes <= found.forward_peak_bytes
        if mode == "train":
            assert 0 < found.forward_device_seconds < found.device_seconds
        else:
            assert found.backward_peak_bytes == 0
    assert result.phases.timed > 0
    for _ in range(5):  # another program on the core delays a message now and then
        if result.phases.messaging < 0.5 * result.phases.total:
            break
        result = profiler.measure(plan(chosen, components))
    assert result.phases.messaging < 0.5 * result.phases.total


def test_recomputation_and_tiles_trade_bytes_for_seconds(profiler: Profiler) -> None:
    profiler.begin(REQUEST)
    saved = {}
    for tile, recompute in ((None, Recompute.NONE), (None, Recompute.SELECTIVE), (2, Recompute.NONE)):
        chosen = candidate(4, bta_tile=tile, recompute=recompute)
        (attention,) = (c for c in components_of(chosen) if c.kind is ComponentKind.ATTENTION)
        result = profiler.measure(plan(chosen, (attention,)))
        saved[tile, recompute] = result.components[0].saved_bytes
    assert saved[2, Recompute.NONE] < saved[None, Recompute.SELECTIVE] < saved[None, Recompute.NONE]


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
def test_the_whole_model_weighs_its_state_and_more(profiler: Profiler, recompute: Recompute) -> None:
    from bexp.explorer.cost.parameters import count_parameters

    profiler.begin(REQUEST)
    whole = measured_whole(profiler, whole_model_plan(candidate(2, recompute=recompute)))
    state = 16 * count_parameters(MODEL)  # float32: weights, gradients and two moments
    assert state < whole.peak_bytes < 3 * state
    assert whole.micro_step_seconds > 0


def test_what_cannot_run_is_unsupported_and_says_why(profiler: Profiler) -> None:
    profiler.begin(REQUEST)
    result = profiler.measure(plan(candidate(2, attention="cudnn")))
    assert result.outcome is Outcome.UNSUPPORTED
    assert "CUDA" in (result.reason or "")
    assert result.failed_component is not None
    assert result.failed_component.kind is ComponentKind.ATTENTION
    assert [m.component.kind for m in result.components] == [ComponentKind.EMBEDDING], "what came before is kept"

    sharded = {**REQUEST.model_dump(), "num_devices": 2, "training": {"sharding": "zero1"}}
    profiler.begin(ExplorationRequest.model_validate(sharded))
    result = profiler.measure(whole_model_plan(candidate(2)))
    assert result.outcome is Outcome.UNSUPPORTED
    assert "zero1" in (result.reason or "")


def test_a_candidate_over_the_memory_limit_is_out_of_memory_and_the_next_trial_works_but_no_other_job(
    profiler: Profiler,
) -> None:
    profiler.begin(REQUEST.model_copy(update={"memory_limit_gib": 0.25}))
    chosen, first = candidate(16), profiler.pid
    result = profiler.measure(plan(chosen, attention_of(16), model=HUGE))
    assert result.outcome is Outcome.OUT_OF_MEMORY, result.reason
    assert result.failed_component == attention_of(16)[0]
    assert result.reason
    assert works(profiler)
    profiler.finish_job()
    assert profiler.pid is None or profiler.pid != first, "a failed trial may leave memory behind"


def test_a_process_that_outgrows_its_limit_unnoticed_by_the_allocator_is_killed(profiler: Profiler) -> None:
    profiler.begin(REQUEST)
    assert profiler._job is not None
    job = profiler._job
    profiler._job = replace(job, ceiling=replace(job.ceiling, limit_bytes=0))  # the process itself has another limit
    restarts = profiler.restarts
    result = slow_trial(profiler)
    assert result.outcome is Outcome.OUT_OF_MEMORY
    assert "memory limit" in (result.reason or "")
    assert profiler.restarts == restarts + 1
    profiler.begin(REQUEST)
    assert works(profiler)


def test_a_killed_process_is_a_crash_and_is_replaced(profiler: Profiler, in_the_middle: Act) -> None:
    profiler.begin(REQUEST)
    restarts, pid = profiler.restarts, profiler.pid
    assert pid is not None
    in_the_middle(lambda: os.kill(pid, signal.SIGSEGV))
    result = slow_trial(profiler)
    assert result.outcome is Outcome.CRASHED
    assert "SIGSEGV" in (result.reason or "")
    assert result.failed_component is not None
    assert profiler.restarts == restarts + 1
    after = profiler.measure(plan(candidate(1), components_of(candidate(1))[:1]))
    assert after.outcome is Outcome.OK, after.reason
    assert after.phases.process_start > 0
    assert profiler.pid != pid


def test_a_trial_whose_process_somebody_kills_runs_once_more_and_is_a_crash_if_that_is_killed_too(
    profiler: Profiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiler.begin(REQUEST)
    restarts, chosen = profiler.restarts, candidate(1)
    small = plan(chosen, components_of(chosen)[:1])
    left = kill_as_trials_begin(monkeypatch, 1)
    result = profiler.measure(small)
    assert result.outcome is Outcome.OK, result.reason
    assert "was killed by SIGKILL; the trial ran once more" in (result.reason or "")
    assert result.phases.process_start > 0
    assert (profiler.restarts, left) == (restarts + 1, [])
    assert profiler.measure(small).reason is None
    left += [signal.SIGKILL, signal.SIGTERM]  # from the end
    result = profiler.measure(small)
    assert result.outcome is Outcome.CRASHED
    assert "twice: the profiler process was killed by SIGKILL" in (result.reason or "")
    assert (profiler.restarts, left) == (restarts + 3, [])


@pytest.mark.parametrize(
    ("second", "killed_again", "reason"),
    [
        ("no result within 40 s", False, "no result within 40 s; before, killed late, and the trial ran once more"),
        ("killed again", True, f"twice: killed again; {KILLED_HINT}"),
    ],
)
def test_the_reason_of_a_trial_that_ran_once_more_names_the_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: str, killed_again: bool, reason: str
) -> None:
    def failed(why: str) -> Measurement:
        return Measurement(candidate=candidate(1), outcome=Outcome.CRASHED, reason=why)

    runs = iter([(failed("killed late"), True), (failed(second), killed_again)])
    monkeypatch.setattr(Profiler, "_run", lambda *_: next(runs))
    found = Profiler("cpu", lock_directory=tmp_path).measure(plan(candidate(1), components_of(candidate(1))[:1]))
    assert found.reason == reason


def kill_as_trials_begin(monkeypatch: pytest.MonkeyPatch, times: int) -> list[signal.Signals]:
    """Kill the processes of the next `times` trials before they run anything. What is returned counts down."""
    left, send = [signal.SIGKILL] * times, ProfilerProcess.send

    def send_and_kill(process: ProfilerProcess, command: Frozen) -> None:
        strikes = isinstance(command, RunTrial) and bool(left)
        if strikes:
            os.kill(process.pid, signal.SIGSTOP)
        send(process, command)
        if strikes:
            os.kill(process.pid, left.pop())
            os.kill(process.pid, signal.SIGCONT)  # other signals than SIGKILL wait for that

    monkeypatch.setattr(ProfilerProcess, "send", send_and_kill)
    return left


def test_a_hung_process_times_out_and_is_replaced(
    profiler: Profiler, in_the_middle: Act, pass_time: Callable[[float], None]
) -> None:
    profiler.begin(REQUEST)
    restarts, pid = profiler.restarts, profiler.pid
    assert pid is not None

    def hang() -> None:
        os.kill(pid, signal.SIGSTOP)
        pass_time(610)

    in_the_middle(hang)
    result = slow_trial(profiler)
    assert result.outcome is Outcome.TIMED_OUT
    assert "within 610 s" in (result.reason or ""), "those of the plan and of the set-up"
    assert profiler.restarts == restarts + 1
    assert profiler.pid is None


def test_a_process_that_dies_between_trials_is_replaced_in_silence_even_if_its_replacement_dies_as_it_starts(
    profiler: Profiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler, "_start_pauses_seconds", (0.05, 0.05, 0.05))
    profiler.begin(REQUEST)
    process, restarts = profiler._process.current, profiler.restarts
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not process.alive)
    kill_while_starting(profiler, 2, monkeypatch)
    assert works(profiler)
    assert profiler.restarts == restarts + 1, "once for the trials; a process that never was ready is no restart"


def test_interrupt_ends_a_running_trial_at_once(profiler: Profiler, in_the_middle: Act) -> None:
    profiler.begin(REQUEST)
    pid = profiler.pid
    assert pid is not None

    def interrupt() -> None:
        os.kill(pid, signal.SIGSTOP)  # it would not end by itself
        threading.Thread(target=profiler.interrupt).start()

    in_the_middle(interrupt)
    with pytest.raises(ProfilerInterruptedError):
        slow_trial(profiler)
    assert not psutil.pid_exists(pid)
    with pytest.raises(ProfilerInterruptedError):
        profiler.begin(REQUEST)
    profiler.start()
    profiler.begin(REQUEST)
    assert works(profiler)


def test_a_device_has_one_profiler_at_a_time(profiler: Profiler, tmp_path: Path) -> None:
    profiler.start()
    directory = profiler._process.locks._locks[0].device._stem.parent
    with pytest.raises(DeviceBusyError, match="in use"):
        Profiler("cpu", environment=ENVIRONMENT, lock_directory=directory, lock_timeout_seconds=0.1).start()


def test_the_process_of_a_clean_job_serves_the_next_one_at_once(profiler: Profiler) -> None:
    profiler.begin(REQUEST)
    assert works(profiler)
    pid = profiler.pid
    profiler.finish_job()
    profiler.start()
    profiler.begin(REQUEST)
    assert works(profiler)
    assert profiler.pid == pid


def test_a_replacement_is_told_who_held_the_device_when_the_job_began(
    profiler: Profiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU names nobody: what the first process said is made up."""
    commands: list[Frozen] = []
    send, receive = ProfilerProcess.send, ProfilerProcess.receive

    def overheard(process: ProfilerProcess, command: Frozen) -> None:
        commands.append(command)
        send(process, command)

    def exaggerated(process: ProfilerProcess, timeout_seconds: float) -> Reply | None:
        reply = receive(process, timeout_seconds)
        return reply.model_copy(update={"others_bytes": 5}) if isinstance(reply, ReportReply) else reply

    monkeypatch.setattr(ProfilerProcess, "send", overheard)
    monkeypatch.setattr(ProfilerProcess, "receive", exaggerated)
    profiler.begin(REQUEST)
    assert profiler.pid is not None
    os.kill(profiler.pid, signal.SIGKILL)
    assert profiler.measure(plan(candidate(1), components_of(candidate(1))[:1])).outcome in Outcome
    assert works(profiler)
    assert [command.others_bytes for command in commands if isinstance(command, Begin)] == [None, 5]


def test_a_spare_takes_over_from_a_process_that_cannot_serve_the_next_job_unless_it_was_killed(tmp_path: Path) -> None:
    compiled = REQUEST.model_copy(update={"execution": Execution.COMPILE})
    with forked_profilers(), Profiler("cpu", environment=ENVIRONMENT, lock_directory=tmp_path, spare=True) as profiler:
        assert spare_of(profiler) is None  # a clean process serves the next job itself
        profiler.begin(compiled)
        doomed = profiler._process._spare
        assert doomed is not None
        os.kill(doomed.pid, signal.SIGKILL)
        wait_until(lambda: not doomed.alive)  # later than it is a zombie, which it is once its first thread has ended
        refused = candidate(1, attention="cudnn")  # at once, while compiling would take seconds
        result = profiler.measure(plan(refused, components_of(refused)[1:2]))  # which also starts another spare
        assert result.outcome is Outcome.UNSUPPORTED
        spare = spare_of(profiler)
        assert spare not in {None, doomed.pid}
        profiler.finish_job()
        profiler.begin(REQUEST)
        assert profiler.pid == spare
        assert spare_of(profiler) is None
        assert works(profiler)


def spare_of(profiler: Profiler) -> int | None:
    spare = profiler._process._spare
    return None if spare is None else spare.pid
