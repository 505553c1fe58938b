from __future__ import annotations

import contextlib
import itertools
import pickle
import random
import re
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

import bexp
from bexp.explorer.records.measurement import Outcome
from bexp.step import agreement
from bexp.step.agreement import attempt
from tests.bexp.step.exploration_ranks import NUM_RANKS
from tests.forked_ranks import run_ranks
from tests.waits import PATIENCE_SECONDS, Clock, wait_until


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    for module in ("exploration", "training_step"):
        monkeypatch.setattr(f"bexp.step.{module}.time", found)
    return found


@pytest.fixture
def without_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search fails before its first size."""

    def refuse(*_: Any) -> Any:
        raise ValueError("the search is broken")

    monkeypatch.setattr("bexp.step.exploration.search_step", refuse)


class Example:
    """A linear model whose step sleeps: 8 ms a micro-batch and 2 ms a sequence."""

    def __init__(self, clock: Any = time) -> None:
        self.clock = clock
        self.model = nn.Linear(4, 4)
        self.sizes: list[int] = []

    def batch(self, size: int) -> torch.Tensor:
        return torch.randn(size, 4)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(x))
        self.clock.sleep(0.008 + 0.002 * len(x))
        loss = self.model(x).square().sum()
        loss.backward()
        found: torch.Tensor = loss.detach()
        return found


def explore(example: Example, **changed: Any) -> Any:
    arguments: dict[str, Any] = {"step": example.step, "batch": example.batch, "parameters": example.model}
    return bexp.explore(**{**arguments, "sizes": (1, 2, 4, 8), "repeats": 3, **changed})


def test_the_search_recommends_the_fastest_size_and_says_how_sure_it_is(clock: Clock) -> None:
    found = explore(Example(clock), effective_batch_size=16)
    assert found.micro_batch_size == 8
    assert found.grad_accum_steps == 2
    assert found.confidence >= 80
    assert found.notes == ()
    assert found.sequences_per_second == pytest.approx(8 / 0.024, rel=0.02)
    fields = bexp.training_arguments(found)
    assert (fields["per_device_train_batch_size"], fields["gradient_accumulation_steps"]) == (8, 2)


def test_it_says_what_it_does_and_prints_as_an_answer(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        if len(x) > 4:
            raise MemoryError("out of memory")
        return example.step(x)

    example = Example(clock)
    found = explore(example, step=step, effective_batch_size=16, progress=True)
    told = capsys.readouterr().err
    assert re.search(r"^BEXP201 \d\d:\d\d:\d\d GMT  micro_batch_size=4: 250 sequences/s$", told, re.MULTILINE)
    assert "micro_batch_size=8: out of memory" in told
    assert "Current recommended micro_batch_size: 4, estimated performance" in told
    lines = repr(found).splitlines()
    assert lines[:2] == ["Recommended micro_batch_size: 4", "  batch             batch_size 16 in 4 accumulation steps"]
    assert "250 sequences/s per device" in lines[2] and f"{found.confidence} out of 100" in lines[3]
    assert "4: 250 sequences/s, 8: out of memory" in " ".join(repr(found).split())
    assert found._repr_html_() == f"<pre>{found!r}</pre>"
    explore(example, step=step)
    assert capsys.readouterr().err == "", "nobody watches"


def test_a_note_says_that_timings_scattered(clock: Clock) -> None:
    example, slowdowns = Example(clock), itertools.cycle([1, 1.6, 1, 1.3, 2.2, 1, 1.7])

    def step(batch: torch.Tensor) -> None:
        begun = clock.now
        example.step(batch)
        clock.now = begun + next(slowdowns) * (clock.now - begun)

    found = explore(example, step=step)
    assert "timings scattered: two measurements of one size differ by about" in found.notes[0]


def test_a_size_that_the_search_does_not_know_leaves_all_to_the_plain_rule(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    found = explore(Example(clock), sizes=(1, 300))
    assert (found.micro_batch_size, found.confidence) == (300, None)
    assert "at most 64 sizes, up to 256" in found.notes[0]
    assert caplog.text == ""


@pytest.mark.usefixtures("without_search")
def test_without_the_search_no_confidence_is_claimed(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    found = explore(Example(clock), effective_batch_size=16)
    assert (found.micro_batch_size, found.grad_accum_steps, found.confidence) == (8, 2, None)
    assert [result.outcome for result in found.results] == ["ok"] * 4
    assert "the search is broken" in found.notes[0]
    assert "no confidence is stated" in found.notes[0]
    assert "Traceback" in caplog.text


@pytest.mark.usefixtures("without_search")
def test_gradients_weights_buffers_and_random_numbers_are_left_alone() -> None:
    example = Example()
    running = torch.zeros(2)
    example.model.register_buffer("running", running)
    example.step(example.batch(2))
    plain = example.step

    def step(x: torch.Tensor) -> torch.Tensor:
        running.add_(1.0)
        return plain(x)

    gradient, weight = example.model.weight.grad, example.model.weight.detach().clone()
    states = (torch.get_rng_state(), random.getstate())
    make = lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1)  # noqa: E731 - a name for one of two
    found = explore(example, step=step, optimizer=make, sizes=(1, 2))
    assert found.optimizer_seconds > 0
    assert example.model.weight.grad is gradient
    assert torch.equal(example.model.weight, weight)
    assert torch.equal(running, torch.zeros(2))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


@pytest.mark.usefixtures("without_search")
@pytest.mark.parametrize("failure", ["out_of_memory", "crashed", "not finite", "timed_out"])
def test_a_size_without_memory_is_the_last_and_after_others_the_next_is_clean(failure: str, clock: Clock) -> None:
    example = Example(clock)
    plain = example.step

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = plain(x)
        if len(x) != 4:
            return loss
        if failure == "out_of_memory":
            raise torch.OutOfMemoryError("CUDA out of memory")
        if failure == "crashed":
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
        if failure == "timed_out":
            assert 500.0 < signal.setitimer(signal.ITIMER_REAL, 0.01)[0] <= 600.0, "what is left of the deadline"
        while failure == "timed_out":
            time.sleep(0.01)
        return loss * torch.nan

    found = explore(example, step=step, deadline_seconds=600.0)
    outcome = "crashed" if failure == "not finite" else failure
    others = [] if failure == "out_of_memory" else ["ok"]
    assert [result.outcome for result in found.results] == ["ok", "ok", outcome, *others]
    assert failure in (found.results[2].reason or "") or failure != "not finite"
    assert found.micro_batch_size == (8 if others else 2)
    assert example.model.weight.grad is None


def test_nothing_fits(clock: Clock) -> None:
    def step(_: torch.Tensor) -> torch.Tensor:
        raise MemoryError

    found = explore(Example(clock), step=step)
    assert found.micro_batch_size is None
    assert found.notes == ("no size fits",)


def test_a_step_without_a_backward_pass_and_a_batch_that_runs_out_of_samples_are_no_answers(clock: Clock) -> None:
    example = Example(clock)
    found = explore(example, step=lambda x: example.model(x).sum())
    assert found.micro_batch_size is None
    assert any("could be measured: the step leaves no gradients" in note for note in found.notes)
    found = explore(example, step=lambda x: example.model(x).sum(), no_sync=contextlib.nullcontext)
    assert any("Under FSDP, leave out no_sync" in note for note in found.notes)

    samples = torch.randn(3, 4)
    found = explore(example, batch=lambda m: samples[:m], sizes=(1, 2, 8))
    assert {each.micro_batch_size: each.reason for each in found.results if each.outcome != "ok"} == {
        8: "batch(8) returns 3 sequences: it must return 8"
    }
    assert found.micro_batch_size == 2


def test_nothing_is_measured_when_the_time_is_used_up(clock: Clock) -> None:
    found = explore(Example(clock), max_seconds=1e-9)
    assert [result.micro_batch_size for result in found.results] == [1]
    assert "used up" in found.notes[0]


@pytest.mark.usefixtures("without_search")
def test_sizes_that_do_not_divide_the_batch_are_left_out(clock: Clock) -> None:
    example = Example(clock)
    explore(example, effective_batch_size=6, sizes=(1, 3, 4))
    assert set(example.sizes) == {1, 3}
    with pytest.raises(ValueError, match="divides"):
        explore(example, effective_batch_size=6, sizes=(4, 5))


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], Any]:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks("tests.bexp.step.exploration_ranks", folder)
    answers: dict[tuple[int, str], Any] = {}
    for rank in range(NUM_RANKS):
        answers |= pickle.loads((folder / f"{rank}.pickle").read_bytes())
    return answers


@pytest.mark.slow(together="forked")
def test_what_one_process_meets_counts_for_all(two_processes: dict[tuple[int, str], Any]) -> None:
    (found, timeout), (other, _) = (two_processes[rank, "alone"] for rank in (0, 1))
    assert found == other
    outcomes = {result.micro_batch_size: result.outcome for result in found.results}
    assert outcomes[1] == "ok"
    assert {outcome for size, outcome in outcomes.items() if size >= 4} == {"out_of_memory"}, "whichever was tried"
    assert found.micro_batch_size in {1, 2}
    assert found.group_is_usable
    assert timeout == timedelta(minutes=30)  # gloo's own, as before


@pytest.mark.slow(together="forked")
def test_nobody_waits_for_a_process_that_fails_between_exchanges(two_processes: dict[tuple[int, str], Any]) -> None:
    (found, seconds), (other, _) = (two_processes[rank, "exchange"] for rank in (0, 1))
    assert found == other
    failed = next(result for result in found.results if result.outcome != "ok")
    assert (failed.outcome, failed.reason) == ("crashed", "RuntimeError: the middle (process 1)")
    assert failed is found.results[-1]
    assert found.micro_batch_size == 1
    assert not found.group_is_usable
    assert any("make the process group again" in note for note in found.notes)
    assert seconds < PATIENCE_SECONDS, "gloo waits 30 minutes"
    assert two_processes[0, "after"] == two_processes[1, "after"] == 2.0


def test_processes_that_have_ended_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    store, num_processes, patience = HashStore(), 20, 0.3
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", lambda: store)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: num_processes)
    monkeypatch.setattr(agreement, "MARGIN_SECONDS", patience)
    monkeypatch.setattr(agreement, "time", clock := Clock())
    failure, _ = agreement.Together(deadline_seconds=0.0).agree(None, [])
    assert failure is not None
    assert failure.reason == "process 1 no longer answers (process 1)"
    assert patience <= clock.now < 2 * patience, "not one after another"


@pytest.mark.parametrize(
    ("statuses", "outcome", "reason", "usable"),
    [
        ([("ok", False, 5), ("ok", False, 5)], "ok", None, True),
        ([("timed_out", False, 5), ("crashed", True, 5)], "crashed", "reason 1 (process 1)", True),
        ([("crashed", True, 5), ("out_of_memory", False, 6)], "out_of_memory", "reason 1 (process 1)", False),
        ([("ok", False, 5), ("crashed", True, None)], "crashed", "reason 1 (process 1)", False),
    ],
)
def test_the_first_failure_counts_unless_memory_is_short(
    statuses: list[tuple[str, bool, int | None]], outcome: str, reason: str | None, usable: bool
) -> None:
    found = agreement._judge(
        [
            {
                "outcome": each,
                "is_first": first,
                "reason": f"reason {rank}",
                "figures": [rank, 7],
                "operations": None if number is None else {"0": number},
            }
            for rank, (each, first, number) in enumerate(statuses)
        ]
    )
    assert (found["outcome"], found["reason"], found["usable"]) == (outcome, reason, usable)
    assert found["figures"] == ([] if outcome != "ok" else [1, 7])


@pytest.fixture
def rung() -> Iterator[list[float]]:
    """When the caller's timer went off. The timer of the test runner goes on afterwards."""
    found: list[float] = []
    others = signal.setitimer(signal.ITIMER_REAL, 0)
    before = signal.signal(signal.SIGALRM, lambda *_: found.append(time.monotonic()))
    yield found
    signal.signal(signal.SIGALRM, before)
    signal.setitimer(signal.ITIMER_REAL, *others)


@pytest.mark.parametrize("deadline", [PATIENCE_SECONDS, 0.05])
def test_a_timer_of_the_caller_goes_on_with_what_is_left_of_it(rung: list[float], deadline: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, 2 * PATIENCE_SECONDS, 7.0)
    failed = attempt(lambda: time.sleep(0.2), deadline)
    assert (failed.outcome if failed else None) == (Outcome.TIMED_OUT if deadline < 0.2 else None)
    left, interval = signal.getitimer(signal.ITIMER_REAL)
    assert PATIENCE_SECONDS < left < 2 * PATIENCE_SECONDS - min(deadline, 0.2) + 0.01 and interval == 7.0 and not rung


def test_a_timer_that_is_over_when_the_step_ends_goes_off_at_once(rung: list[float]) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    assert attempt(lambda: time.sleep(0.1), PATIENCE_SECONDS) is None
    wait_until(lambda: rung)
    assert len(rung) == 1


def test_no_timer_is_left_where_there_was_none(rung: list[float]) -> None:
    assert attempt(lambda: None, PATIENCE_SECONDS) is None
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0) and not rung


@pytest.mark.parametrize("check", [lambda _: False, lambda _: True, None])
def test_operations_are_aborted_once_a_process_or_the_store_is_gone(
    check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the deadline, unless no process has failed; the store is gone with the first process."""

    def gone(_: Any) -> bool:
        raise RuntimeError("Connection reset by peer")

    aborted: list[float] = []
    monkeypatch.setattr(agreement, "time", clock := Clock())
    monkeypatch.setattr(agreement, "_abort_nccl", lambda: aborted.append(clock.monotonic()))
    watched: Any = SimpleNamespace(
        _deadline=60.0, _key="key", _number=1, _store=SimpleNamespace(check=check or gone), _has_failed=None
    )
    watched._has_failed = partial(agreement.Together._has_failed, watched)
    begun = clock.monotonic()
    ended: Any = SimpleNamespace(wait=clock.sleep)
    agreement.Together._watch(watched, ended, 2.0)
    waited = aborted[0] - begun
    assert waited > 60 if check is not None and not check(0) else waited < 4
