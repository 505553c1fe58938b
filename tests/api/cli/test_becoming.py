"""Commands whose process becomes another one, so that signals and exit codes are that one's."""

from __future__ import annotations

import os

import pytest
from typer.testing import CliRunner

from bexp.api.cli import app
from bexp.child_process import module_command

ACCUMULATION = "bexp.workers.targets.custom.accumulation"


@pytest.mark.parametrize(
    ("given", "module", "told"),
    [
        ("worker", "bexp.workers", ""),
        ("worker --device cuda:0-3 --group", "bexp.workers", "--device cuda:0-3 --group"),
        ("worker --ray auto", "bexp.workers", "--ray auto"),
        ("doctor", "bexp.workers", "doctor"),
        ("doctor --json", "bexp.workers", "doctor --json"),
        ("check-accumulation -- true x", ACCUMULATION, "-- true x"),
        (
            "check-accumulation --json --device cpu --batch-size 4 --micro-batch-size 1 -- true --json",
            ACCUMULATION,
            "--batch-size 4 --micro-batch-size 1 --device cpu --json -- true --json",
        ),
    ],
)
def test_a_command_becomes_a_module_with_what_was_given(
    given: str, module: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEXP_DATABASE_URL", "sqlite:////tmp/other.db")
    became: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda _, command, environment: became.append((command, dict(environment))))
    CliRunner().invoke(app, given.split())
    ((command, environment),) = became
    assert command == module_command(module, *told.split())
    assert module != "bexp.workers" or environment["BEXP_DATABASE_URL"] == "sqlite:////tmp/other.db"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("check-accumulation --device replay:x -- true", "--device is cpu or cuda:0: a recording has no gradients"),
        ("check-accumulation --device tpu -- true", "--device 'tpu' is none of cpu, cuda:0"),
        ("worker --device tpu", "--device 'tpu' is none of cpu, cuda:0"),
    ],
)
def test_a_device_that_it_cannot_use_is_refused_before(given: str, said: str) -> None:
    done = CliRunner().invoke(app, given.split())
    assert (done.exit_code, said in done.stderr) == (2, True), done.stderr
