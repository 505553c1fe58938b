"""Training commands that are measured as they are: they answer, write nothing, and are gone afterwards."""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from bexp.explorer.model.parts import EvaluationBatch
from bexp.explorer.records.measurement import Outcome
from bexp.tune.clock import FEWEST_VARIED
from bexp.tune.placeholders import APPLY_VALUES
from bexp.tune.waiting import Notes
from bexp.workers.devices.lock import DeviceBusyError, DeviceLocks
from bexp.workers.instruments.failures import TrialFailedError
from bexp.workers.targets.custom import command
from bexp.workers.targets.custom.command import FIRST_SIZE, NO_APPLY, NO_SIZE, SILENT_SECONDS, CommandProcess
from bexp.workers.targets.custom.training_command import TrainingCommand, locks_of
from tests.forked_trainings import SCRIPTS
from tests.tune_commands import texts as of_a_trainer
from tests.tune_commands import with_a_loader
from tests.waits import PATIENCE_SECONDS, wait_until
from tests.workers.targets.custom.commands import Commands, measure, open_

pytestmark = [pytest.mark.slow(together="trainings"), pytest.mark.usefixtures("forked_trainings")]


def test_a_trainer_is_measured_at_several_sizes_in_one_start_and_writes_nothing(commands: Commands) -> None:
    out = commands.folder / "out"
    script = str(SCRIPTS / "with_trainer.py")
    slowly = ("--seconds_per_token", "5e-4")
    process = commands(script, *slowly, "--output_dir", str(out), gradient_checkpointing=[False, True])
    assert open_(process, gradient_checkpointing=True) == {"dimensions": {"gradient_checkpointing": [False, True]}}
    described = process.ask("describe", PATIENCE_SECONDS)
    assert described["class_name"] == "GPT2LMHeadModel"
    assert (described["batch_size"], described["micro_batch_size"]) == (8, 2)
    assert 30 < described["seq_length"] < 45, "the mean length of the texts"
    assert described["samples"]["tail"][-1] == 128
    assert described["processes"] is None
    off = {each.partition("=")[0] for each in described["switched_off"]}
    assert {"eval_strategy", "save_strategy", "logging_strategy", "EarlyStoppingCallback"} <= off
    assert "disable_tqdm" not in off
    evaluation = described["evaluation"]
    assert (evaluation["batch_size"], evaluation["length"]) == (8, 128)
    assert evaluation["peak_bytes"] is not None
    first = process.pid
    small, large = measure(process, 2), measure(process, 8)
    assert process.pid == first
    assert 1.0 < large.micro_step_seconds / small.micro_step_seconds < 8.0
    assert large.optimizer_seconds > 0
    assert large.repeats >= 6
    process.end()
    assert not psutil.pid_exists(first)
    assert list(commands.folder.iterdir()) == []


@pytest.mark.parametrize(
    ("texts", "arguments", "per_token", "sizes"),
    [
        (
            of_a_trainer.Texts(200, long_tail=True),
            ("with_trainer.py", "--long_tail", "--per_device_train_batch_size", "4", "--output_dir", "out"),
            4e-4,
            [4],
        ),
        (
            with_a_loader.Texts(200),
            ("with_a_loader.py", "--batch", "{micro_batch_size}", "--accumulate", "{grad_accum_steps}"),
            1e-4,
            [4],
        ),
        (with_a_loader.Texts(200), ("with_a_loader.py", "--accelerate"), 1e-4, [4, 8]),
    ],
)
def test_seconds_are_those_of_all_data_if_its_lengths_are_very_unequal(
    commands: Commands,
    texts: of_a_trainer.Texts | with_a_loader.Texts,
    arguments: tuple[str, ...],
    per_token: float,
    sizes: list[int],
) -> None:
    script, *others = arguments
    process = commands(str(SCRIPTS / script), *others, "--seconds_per_token", str(per_token), batch_size=8)
    open_(process)
    described = process.ask("describe", PATIENCE_SECONDS)
    lengths = np.array([len(texts[place]["input_ids"]) for place in range(200)])
    assert described["seq_length"] == round(lengths.mean())
    for size in sizes:
        found = measure(process, size)
        assert found.repeats >= FEWEST_VARIED
        rng = np.random.default_rng(0)
        longest = [lengths[rng.permutation(200)].reshape(-1, size).max(axis=1).mean() for _ in range(100)]
        truth = per_token * size * float(np.mean(longest))
        assert 0.95 * truth < found.micro_step_seconds < 2.0 * truth, "the model takes little beside them"


@pytest.mark.parametrize(
    ("given", "size", "batch_size"),
    [
        (("--batch", "{micro_batch_size}", "--accumulate", "{grad_accum_steps}"), 4, 64),
        (("--accelerate", "--batch", "2"), 2, 4),
    ],
)
def test_widths_that_are_new_before_the_first_step_of_a_loop_count(
    commands: Commands, given: tuple[str, ...], size: int, batch_size: int
) -> None:
    """A step of the plain loop has all that a trial draws; accelerate's first one has the size that is asked for."""
    script = str(SCRIPTS / "with_a_loader.py")
    process = commands(script, *given, "--seconds_per_new_width", "0.1", batch_size=batch_size)
    open_(process)
    found = measure(process, size)
    lengths = np.array([len(with_a_loader.Texts(200)[place]["input_ids"]) for place in range(200)])
    rng = np.random.default_rng(0)
    epochs = [rng.permutation(lengths).reshape(-1, size).max(axis=1) for _ in range(20)]
    share = np.mean([len(np.unique(widths)) / len(widths) for widths in epochs])
    assert 0.085 * share < found.micro_step_seconds < 0.15 * share, "the model takes little beside them"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (("with_accelerate.py", "--output", "out"), "accelerate's loop has no 'wrong' that could be set"),
        (
            ("with_a_loop.py", "--batch", "{micro_batch_size}", "--output", "out"),
            "a loop of its own has no 'wrong' that could be set",
        ),
    ],
)
def test_what_nothing_can_set_is_refused_in_a_sentence(commands: Commands, script: tuple[str, ...], said: str) -> None:
    process = commands(str(SCRIPTS / script[0]), *script[1:], wrong=[True, False], batch_size=4)
    with pytest.raises(TrialFailedError) as caught:
        open_(process)
        process.ask("describe", PATIENCE_SECONDS)
    assert str(caught.value) == f"{said}: put {{wrong}} where the command takes it"
    assert caught.value.outcome is Outcome.UNSUPPORTED
    assert not process.alive


def test_a_loop_with_its_size_in_the_command_is_started_for_each_size(commands: Commands) -> None:
    out = commands.folder / "model"
    process = commands(
        *(str(SCRIPTS / "with_a_loop.py"), "--batch", "{micro_batch_size}", "--accumulate", "{grad_accum_steps}"),
        *("--output", str(out)),
        batch_size=64,
    )
    open_(process)
    described = process.ask("describe", PATIENCE_SECONDS)
    assert (described["batch_size"], described["micro_batch_size"]) == (64, FIRST_SIZE)
    assert described["num_parameters"] == 256 * 512 * 2 + 512 + 256
    assert measure(process, 1).repeats >= 3 * 64
    assert measure(process, 32).repeats >= 3 * 2
    assert not out.exists()


def test_a_loop_needs_no_transformers(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = commands.folder / "libraries"
    libraries.mkdir()
    (libraries / "transformers.py").write_text("raise ImportError('there is none')")
    monkeypatch.setenv("PYTHONPATH", str(libraries))
    process = commands("-u", str(SCRIPTS / "with_a_loop.py"), "--batch", "{micro_batch_size}", "--output", "model")
    open_(process)
    assert measure(process, 2).repeats >= 6


def test_a_loop_of_accelerates_gets_its_sizes_from_within(commands: Commands) -> None:
    out = commands.folder / "model"
    process = commands("-u", str(SCRIPTS / "with_accelerate.py"), "--output", str(out))
    open_(process)
    first = process.pid
    described = process.ask("describe", PATIENCE_SECONDS)
    assert (described["batch_size"], described["micro_batch_size"]) == (16, 4)
    assert measure(process, 4).repeats >= 6
    assert measure(process, 16).micro_step_seconds > 0
    assert process.pid == first, "one start serves all"
    assert measure(process, 8).repeats > 0
    process.end()
    assert not psutil.pid_exists(first)
    assert list(commands.folder.iterdir()) == []


@pytest.mark.parametrize(
    ("other", "why"),
    [("prior", "reads several loaders in a step"), ("unread", "does not read the first prepared loader")],
)
def test_a_loop_that_trains_with_other_loaders_than_the_first_one_is_refused(
    commands: Commands, other: str, why: str
) -> None:
    process = commands(str(SCRIPTS / "with_accelerate.py"), "--output", "model", "--other", other)
    with pytest.raises(TrialFailedError) as caught:
        open_(process)
    assert str(caught.value) == f"the training {why}: put {{micro_batch_size}} where the command takes it"


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        (("--other", "evaluation"), (16, 4)),
        (("--other", "midway"), (16, 4)),
        (("--other", "prior", "--batch", "{micro_batch_size}"), (8, 2)),
    ],
)
def test_the_loader_that_trains_has_the_size_whatever_else_is_prepared_and_read(
    commands: Commands, given: tuple[str, ...], sizes: tuple[int, int]
) -> None:
    process = commands(str(SCRIPTS / "with_accelerate.py"), "--output", "model", *given, batch_size=sizes[0])
    open_(process)
    assert measure(process, sizes[1]).repeats >= 6
    assert process._hello["micro_batch_size"] == sizes[1]


def test_a_command_on_several_devices_sees_them_all_and_keeps_others_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEXP_LOCK_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b,MIG-c")
    script = "import os; raise SystemExit('sees ' + os.environ['CUDA_VISIBLE_DEVICES'])"
    other = DeviceLocks(["MIG-c"], directory=tmp_path)

    def said(seconds: float) -> str:
        arguments = (sys.executable, "-c", script)
        given = TrainingCommand(arguments, str(tmp_path), {}, devices=("cuda:0", "cuda:2"))
        process = CommandProcess(given)
        try:
            with pytest.raises(TrialFailedError) as caught:
                process.ask("open", seconds, device="cuda:0", choice=None)
            return str(caught.value)
        finally:
            process.end()

    assert other.acquire(timeout_seconds=0)
    assert f"MIG-c is in use by process {os.getpid()} of user " in said(0.1)
    other.release()
    assert "sees MIG-a,MIG-c" in said(PATIENCE_SECONDS)
    with pytest.raises(DeviceBusyError):
        other.acquire(timeout_seconds=0)  # between two starts of the command, too
    locks_of(("cuda:2",)).release()


@pytest.mark.parametrize("num_ends", [1, 2])
def test_a_loop_that_ends_by_itself_after_other_sizes_is_started_once_more(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, num_ends: int
) -> None:
    process, starts = commands("train.py"), list[int | None]()
    told = {"outcome": "ok", "data": {}, "micro_step_seconds": 1.0}
    replies = iter([told, *[None] * num_ends, told])

    def start(size: int | None, _: float) -> None:
        starts.append(size)
        process._hello, process._has_served = {"takes_sizes": True, "num_devices": 1}, False

    def receive(_: float) -> dict[str, Any]:
        if (reply := next(replies)) is None:
            raise TrialFailedError(Outcome.UNSUPPORTED, "it ended")
        return dict(reply)

    monkeypatch.setattr(process, "_popen", SimpleNamespace(returncode=0, poll=lambda: None))
    monkeypatch.setattr(process._line, "send", lambda _: None)
    monkeypatch.setattr(process, "_start", start)
    monkeypatch.setattr(process, "_receive", receive)
    monkeypatch.setattr(process, "_stop", lambda: None)
    start(None, 0.0)
    assert process._measure(2, 0.0)["micro_step_seconds"] == 1.0
    if num_ends == 1:
        assert process._measure(4, 0.0)["micro_step_seconds"] == 1.0
    else:
        with pytest.raises(TrialFailedError, match="it ended"):
            process._measure(4, 0.0)
    assert starts == [None, None]


def test_a_loop_whose_size_cannot_be_set_says_how_to_name_it(commands: Commands) -> None:
    process = commands(str(SCRIPTS / "with_a_loop.py"), "--output", "model")
    with pytest.raises(TrialFailedError, match=r"put \{micro_batch_size\} where") as caught:
        open_(process)
    assert (caught.value.outcome, str(caught.value)) == (Outcome.UNSUPPORTED, NO_SIZE)
    assert not process.alive


@pytest.mark.parametrize(
    ("code", "outcome", "said"),
    [
        ("print('nothing to do')", Outcome.UNSUPPORTED, "does not train: .*its last output: nothing to do"),
        ("raise SystemExit('no data set')", Outcome.CRASHED, "exited with status 1: no data set"),
        ("raise MemoryError('out of memory')", Outcome.OUT_OF_MEMORY, "MemoryError: out of memory"),
        ("import os; os.kill(os.getpid(), 11)", Outcome.CRASHED, "SIGSEGV"),
    ],
)
def test_a_command_that_ends_before_its_first_step_says_why(
    commands: Commands, code: str, outcome: Outcome, said: str
) -> None:
    process = commands("-c", code)
    with pytest.raises(TrialFailedError, match=said) as caught:
        open_(process)
    assert caught.value.outcome is outcome


def test_a_command_that_is_not_there_is_named(commands: Commands) -> None:
    process = CommandProcess(TrainingCommand(("no-such-trainer",), str(commands.folder), {}))
    commands.started.append(process)
    with pytest.raises(TrialFailedError, match="'no-such-trainer' cannot be started: No such file"):
        open_(process)


def test_the_output_of_an_earlier_start_is_not_that_of_a_later_one(commands: Commands) -> None:
    process = commands("-c", "print('later'); raise SystemExit(3)")
    process._tail.append("earlier")
    with pytest.raises(TrialFailedError, match="later") as caught:
        open_(process)
    assert "earlier" not in str(caught.value)


def test_a_command_that_hangs_is_ended_with_all_that_it_has_started(commands: Commands) -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "print('x' * 5_000_000, flush=True)\n"
        "time.sleep(600)\n"
    )
    process = commands("-c", code)
    with pytest.raises(TrialFailedError, match=r"not answer in time: it ran for \d+ s and made no optimizer") as caught:
        process.ask("open", 1.5, device="cpu", choice=None)
    assert caught.value.outcome is Outcome.TIMED_OUT
    wait_until(lambda: not _named("time.sleep(600)"))


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("print('loading', flush=True); import time; time.sleep(600)", "; its last output: loading"),
        ("import time; time.sleep(600)", ""),
    ],
)
def test_a_start_that_takes_long_is_said_once(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, printed: str
) -> None:
    notes = Notes(tmp_path)
    for _ in range(2):
        process = CommandProcess(TrainingCommand((sys.executable, "-c", code), str(tmp_path), {}, None, str(tmp_path)))
        commands.started.append(process)
        said: list[str] = []

        def later(process: CommandProcess = process, said: list[str] = said) -> float:
            """The start has taken long as soon as all is printed, and all its time once that is said."""
            said += notes.new()
            is_started = process._said_at < math.inf and (process._tail or not printed)
            return time.monotonic() + (1e4 if said else SILENT_SECONDS if is_started else 0.0)

        monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=later))
        with pytest.raises(TrialFailedError, match="did not answer in time"):
            process.ask("open", PATIENCE_SECONDS, device="cpu", choice=None)
        assert [*said, *notes.new()] == [f"the command has run for 20 s and made no optimizer step yet{printed}"]


COMPILED_LOOP = """
import sys, torch
size, compiles = int(sys.argv[1]), sys.argv[2] == "true"
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
model = torch.compile(model, backend="aot_eager") if compiles else model
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(100_000):
    model(torch.randn(size, 1 + step % 3, 8)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("compiles", ["true", "false"])
def test_the_seconds_of_a_compilation_are_reported(commands: Commands, compiles: str) -> None:
    script = commands.folder / "loop.py"
    script.write_text(COMPILED_LOOP)
    process = commands("-u", str(script), "{micro_batch_size}", "{compiles}", batch_size=4, compiles=["true", "false"])
    open_(process, compiles=compiles)
    figures = process.ask("measure", PATIENCE_SECONDS, micro_batch_size=4)
    assert bool(figures["compile_seconds"]) == (compiles == "true")


def test_a_start_that_trains_in_time_says_nothing(commands: Commands, tmp_path: Path) -> None:
    code = "print('nothing to do')"
    process = CommandProcess(TrainingCommand((sys.executable, "-c", code), str(tmp_path), {}, None, str(tmp_path)))
    commands.started.append(process)
    with pytest.raises(TrialFailedError):
        open_(process)
    assert Notes(tmp_path).new() == []


def test_a_command_ends_when_the_trial_does(commands: Commands) -> None:
    process = commands(str(SCRIPTS / "with_trainer.py"), "--output_dir", str(commands.folder / "out"))
    open_(process)
    assert process._line is not None
    assert process._popen is not None
    process._line.close()  # as the kernel does for a profiler that is killed
    assert process._popen.wait(PATIENCE_SECONDS) == 0


def test_the_hook_runs_the_sitecustomize_that_it_hides(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    own = commands.folder / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text(
        "import pathlib, sys\npathlib.Path(sys.argv[0] or 'x')\nprint('own code ran')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(own))
    with pytest.raises(TrialFailedError, match="own code ran"):
        open_(commands("-c", "import bexp.tune.imports"))


def _named(text: str) -> list[int]:
    processes = [(process.pid, str(process.info["cmdline"])) for process in psutil.process_iter(["cmdline"])]
    return [pid for pid, line in processes if text in line and "pytest" not in line]


def test_a_command_whose_own_size_has_no_memory_is_described_by_half_of_it(commands: Commands) -> None:
    """Neither is the lack of memory of its evaluation, of 8 x 128 tokens, a fault of the training."""
    given = ("--fail_from", "2", "--evaluation_fails_from_tokens", "1024")
    process = commands(str(SCRIPTS / "with_trainer.py"), "--output_dir", str(commands.folder / "out"), *given)
    open_(process)
    described = process.ask("describe", PATIENCE_SECONDS)
    assert (described["batch_size"], described["micro_batch_size"]) == (8, 1), "its own size is 2"
    assert described["evaluation"]["peak_bytes"] is None
    assert measure(process, 1).repeats > 0


def test_an_evaluation_that_fails_is_told_and_is_no_fault_of_the_training(commands: Commands) -> None:
    given = ("--output_dir", str(commands.folder / "out"), "--evaluation_is_broken")
    process = commands(str(SCRIPTS / "with_trainer.py"), *given)
    open_(process)
    evaluation = process.ask("describe", PATIENCE_SECONDS)["evaluation"]
    assert evaluation["peak_bytes"] is None
    assert evaluation["failure"].startswith("crashed: ")
    assert "ValueError: no such metric" in evaluation["failure"]
    assert EvaluationBatch.model_validate(evaluation).batch_size == 8
    assert measure(process, 1).repeats > 0


@pytest.mark.parametrize("first", range(6))
def test_a_long_failure_of_an_evaluation_is_shortened_to_what_may_be_stored(first: int) -> None:
    """As of a process that died, with its last lines."""

    def died(_: float) -> None:
        raise TrialFailedError(Outcome.CRASHED, "x" * first + " name" * 400)

    process: Any = SimpleNamespace(
        _hello={"evaluation": {"batch_size": 8, "length": 0}},
        _popen=object(),
        _most_bytes=1,
        _line=SimpleNamespace(send=lambda _: None),
        _receive=died,
        _explained=lambda outcome, reason: (outcome, reason),
        _start=lambda *_: None,
    )
    found = CommandProcess._evaluate(process, 1.0)
    assert EvaluationBatch.model_validate(found).failure is not None


def test_a_child_that_has_left_the_session_of_a_dead_parent_is_ended(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent crashes before it connects, so that nobody is left who knows of the child."""
    monkeypatch.setattr("bexp.workers.targets.custom.command.END_SECONDS", 4.0)  # it holds the output as well
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    parent = (
        "import subprocess, sys; "
        f"child = subprocess.Popen([sys.executable, '-c', {code!r}], start_new_session=True); "
        "open('child', 'w').write(str(child.pid)); sys.exit('broken')"
    )
    process = commands("-c", parent)
    with pytest.raises(TrialFailedError, match="broken"):
        open_(process)
    child = int((commands.folder / "child").read_text())
    assert not psutil.pid_exists(child)


def test_what_apply_does_to_the_model_is_tried_and_measured(commands: Commands) -> None:
    given = (str(SCRIPTS / "with_trainer.py"), "--output_dir", str(commands.folder / "out"), "--fail_if_applied")
    process = commands(*given, bexp_apply=APPLY_VALUES)
    assert open_(process) == {"dimensions": {"bexp_apply": ["none", "loss"]}}, "it has no experts, and this is a CPU"
    assert measure(process, 2).repeats > 0
    applied = commands(*given, bexp_apply=APPLY_VALUES)
    open_(applied, bexp_apply="loss")
    with pytest.raises(TrialFailedError, match="the loss is"):
        measure(applied, 2)


@pytest.mark.parametrize(
    ("hello", "said"),
    [
        ({}, NO_APPLY),  # its size stands in the command, so that it was not started
        ({"kind": "accelerate's loop"}, NO_APPLY),
        ({"bexp_apply": ["none"], "class_name": "Net"}, "bexp.apply can do nothing for Net"),
    ],
)
def test_apply_is_refused_where_it_can_do_nothing(
    commands: Commands, hello: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = commands("train.py", bexp_apply=APPLY_VALUES)
    monkeypatch.setattr(process, "_start", lambda *_: process._hello.update(hello))
    with pytest.raises(TrialFailedError) as caught:
        open_(process)
    assert (caught.value.outcome, str(caught.value)) == (Outcome.UNSUPPORTED, said)
