"""What an idle profiler process does until a command comes."""

from __future__ import annotations

import queue
from collections.abc import Callable

import pytest
import torch

from bexp.explorer.model.expert_kernels import EXPERT_KERNELS
from bexp.workers.instruments.device_instruments import Instruments
from bexp.workers.process.protocol import Command, EndJob
from bexp.workers.profiler import device as preparation
from bexp.workers.profiler.parent import CommandQueue
from bexp.workers.targets import choice


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is prepared, in its order. The GPU is not touched."""
    found: list[str] = []

    def note(name: str) -> Callable[[], None]:
        return lambda: found.append(name)

    monkeypatch.setattr(preparation, "target_imports", lambda: (note("imports"),))
    monkeypatch.setattr(preparation, "freeze_imports", note("freeze"))
    monkeypatch.setattr(preparation, "is_poisoned", lambda device: False)
    monkeypatch.setattr(Instruments, "settle", lambda self, *, release: found.append(f"settle {release}"))
    monkeypatch.setattr(preparation, "kernel_checks", lambda device: (note("attention"), note("experts")))
    return found


def instruments(device: str) -> Instruments:
    """Those of a device that is not opened."""
    made = Instruments.__new__(Instruments)
    made.device = torch.device(device)
    return made


def commands(*waiting: Command) -> CommandQueue:
    made: CommandQueue = queue.SimpleQueue()
    for command in waiting:
        made.put(command)
    return made


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cuda:0", ["imports", "freeze", "attention", "experts", "settle True"]),
        ("cpu", ["imports", "freeze"]),
        (None, ["imports", "freeze"]),
    ],
)
def test_an_idle_process_imports_libraries_and_builds_kernels_for_its_gpu(
    done: list[str], device: str | None, expected: list[str]
) -> None:
    preparation.prepare(commands(), None if device is None else instruments(device))
    assert done == expected


def test_a_command_ends_the_preparation_after_the_step_in_which_it_comes(done: list[str]) -> None:
    waiting = commands()
    taken: list[int] = []

    def step() -> None:
        taken.append(len(taken))
        if len(taken) == 2:
            waiting.put(EndJob())

    preparation.do_until_asked(waiting, [step] * 5)
    preparation.prepare(waiting, instruments("cpu"))
    assert taken == [0, 1]
    assert done == []


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(), KeyError("a fault of a compiler")])
def test_a_check_that_fails_is_left_to_the_job(
    done: list[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(preparation, "kernel_checks", lambda device: [fail])
    preparation.prepare(commands(), instruments("cuda:0"))
    assert done == ["imports", "freeze", "settle True"]


def test_a_process_whose_device_a_check_has_made_unusable_is_killed_before_a_job_comes(
    done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end() -> None:
        raise SystemExit

    monkeypatch.setattr(preparation, "is_poisoned", lambda device: True)
    monkeypatch.setattr(preparation, "end_group", end)
    with pytest.raises(SystemExit):
        preparation.prepare(commands(), instruments("cuda:0"))
    assert done == ["imports", "freeze", "attention", "experts"]


def test_a_library_that_is_broken_in_any_way_does_not_end_an_idle_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise AttributeError(name)

    monkeypatch.setattr(choice, "import_module", fail)
    preparation.do_until_asked(commands(), choice.target_imports())


def test_the_checks_are_those_of_all_that_is_explored_and_the_last_starts_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[torch.device] = []
    monkeypatch.setattr(preparation, "start_compiler", started.append)
    checks = list(preparation.kernel_checks(torch.device("cpu")))
    for check in checks:
        assert not started
        check()
    assert len(checks) == len(preparation.ATTENTION) + sum(kernel.is_explored for kernel in EXPERT_KERNELS) + 1
    assert started == [torch.device("cpu")]
