"""What an idle profiler process does until a command comes."""

from __future__ import annotations

import queue
from collections.abc import Callable

import pytest
import torch

from bexp.kernels.experts.registry import expert_backends
from workers.process.protocol import Command, EndJob
from workers.profiler import preparation
from workers.profiler.parent import CommandQueue


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is prepared, in its order. The GPU is not touched."""
    found: list[str] = []

    def note(name: str) -> Callable[[], None]:
        return lambda: found.append(name)

    monkeypatch.setattr(preparation, "preload_targets", note("imports"))
    monkeypatch.setattr(preparation, "freeze_imports", note("freeze"))
    monkeypatch.setattr(preparation, "kernel_checks", lambda device: (note("attention"), note("experts")))
    return found


def commands(*waiting: Command) -> CommandQueue:
    made: CommandQueue = queue.SimpleQueue()
    for command in waiting:
        made.put(command)
    return made


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cuda:0", ["imports", "freeze", "attention", "experts"]),
        ("cpu", ["imports", "freeze"]),
        (None, ["imports", "freeze"]),
    ],
)
def test_an_idle_process_imports_libraries_and_builds_kernels_for_its_gpu(
    done: list[str], device: str | None, expected: list[str]
) -> None:
    preparation.prepare(commands(), None if device is None else torch.device(device))
    assert done == expected


def test_a_command_ends_the_preparation_after_the_step_in_which_it_comes(done: list[str]) -> None:
    waiting = commands()
    taken: list[int] = []

    def step() -> None:
        taken.append(len(taken))
        if len(taken) == 2:
            waiting.put(EndJob())

    preparation.do_until_asked(waiting, [step] * 5)
    preparation.prepare(waiting, torch.device("cuda:0"))
    assert taken == [0, 1]
    assert done == []


def test_a_device_without_free_memory_is_left_to_the_job(done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(preparation, "kernel_checks", lambda device: [fail])
    preparation.prepare(commands(), torch.device("cuda:0"))
    assert done == ["imports", "freeze"]


def test_the_checks_are_those_of_every_back_end() -> None:
    checks = list(preparation.kernel_checks(torch.device("cpu")))
    for check in checks:
        check()
    assert len(checks) == len(preparation.ATTENTION) + len(expert_backends())
