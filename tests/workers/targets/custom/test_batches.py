"""The batch of a command is counted in trials: no size is recommended with which it would be another one."""

from __future__ import annotations

import re

import pytest

from bexp.explorer.records.measurement import Outcome
from bexp.tune.clock import ACCUMULATION
from bexp.workers.instruments.failures import TrialFailedError
from bexp.workers.targets.custom.training_command import OtherBatchError, TrainingCommand
from tests.forked_trainings import SCRIPTS
from tests.waits import PATIENCE_SECONDS
from tests.workers.targets.custom.commands import Commands, measure, open_

pytestmark = [pytest.mark.slow(together="trainings"), pytest.mark.usefixtures("forked_trainings")]
LOOP = (str(SCRIPTS / "with_a_loop.py"), "--output", "model", "--batch", "{micro_batch_size}")
STEPS = "{grad_accum_steps}"


def test_a_loop_that_accumulates_by_itself_is_measured_at_the_size_that_keeps_the_batch(commands: Commands) -> None:
    process = commands(*LOOP, "--accumulate", "4", batch_size=32)
    open_(process)
    described = process.ask("describe", PATIENCE_SECONDS)
    assert (described["batch_size"], described["micro_batch_size"]) == (32, 8)
    assert process.ask("measure", PATIENCE_SECONDS, micro_batch_size=8)["grad_accum_steps"] == 4
    with pytest.raises(OtherBatchError, match="has 4 micro-batches of 2 in an optimizer step: a batch of 8, not 32"):
        measure(process, 2)
    assert process._popen is None, "it was not started: two sizes have shown that its steps do not follow the size"


@pytest.mark.parametrize("stated", [24, 64])
def test_a_loop_that_keeps_another_batch_than_the_stated_one_is_refused_with_a_way_that_works(
    commands: Commands, stated: int
) -> None:
    arguments = (*LOOP, "--total", "32")
    process = commands(*arguments, batch_size=stated)
    open_(process)
    with pytest.raises(TrialFailedError, match=f"a batch of 32, not {stated}: say --batch-size 32, or put") as caught:
        process.ask("describe", PATIENCE_SECONDS)
    assert caught.value.outcome is Outcome.UNSUPPORTED
    process = commands(*arguments, batch_size=32)
    open_(process)
    assert process.ask("describe", PATIENCE_SECONDS)["batch_size"] == 32
    assert measure(process, 16).repeats > 1
    process = commands(*LOOP, "--accumulate", STEPS, batch_size=stated)
    open_(process)
    assert process.ask("describe", PATIENCE_SECONDS)["batch_size"] == stated


def test_steps_in_braces_that_do_not_reach_the_accumulation_are_noticed(commands: Commands) -> None:
    process = commands(*LOOP, "--accumulate", "2", "--fail-from", f"9{STEPS}", batch_size=16)
    open_(process)
    with pytest.raises(OtherBatchError, match="a batch of 4, not 16"):
        measure(process, 2)


def test_without_a_stated_batch_what_was_counted_is_reported(commands: Commands) -> None:
    process = commands(*LOOP, "--accumulate", "3")
    open_(process)
    assert process.ask("describe", PATIENCE_SECONDS)["batch_size"] is None
    assert process.ask("measure", PATIENCE_SECONDS, micro_batch_size=2)["grad_accum_steps"] == 3


def test_a_size_in_braces_that_does_not_reach_the_trainer_is_refused(commands: Commands) -> None:
    arguments = ("--output_dir", "out", "--per_device_train_batch_size", "4", "--fail_from", "9{micro_batch_size}")
    process = commands(str(SCRIPTS / "with_trainer.py"), *arguments)
    open_(process)
    with pytest.raises(
        TrialFailedError, match=r"with 2 for \{micro_batch_size\}, transformers' Trainer has a size of 4"
    ):
        measure(process, 2)


def test_a_size_in_braces_that_does_not_reach_the_loader_of_accelerates_is_refused(commands: Commands) -> None:
    process = commands(str(SCRIPTS / "with_accelerate.py"), "--output", "model-{micro_batch_size}")
    open_(process)
    with pytest.raises(TrialFailedError, match=r"with 2 for \{micro_batch_size\}, a loop of its own has a size of 4"):
        measure(process, 2)


def test_a_loop_of_accelerates_that_counts_by_itself_has_the_batch_that_it_trains_with(commands: Commands) -> None:
    process = commands(str(SCRIPTS / "with_accelerate.py"), "--output", "model", "--by-hand", "3")
    open_(process)
    described = process.ask("describe", PATIENCE_SECONDS)
    assert (described["micro_batch_size"], described["batch_size"]) == (4, 12)


@pytest.mark.parametrize(
    ("script", "output", "size"),
    [
        ("with_trainer.py", "--output_dir", 2),
        ("with_accelerate.py", "--output", 4),
        ("with_lightning.py", "--output", 4),
    ],
)
def test_a_size_that_is_the_whole_batch_is_measured_without_gradients_of_an_earlier_micro_batch(
    commands: Commands, script: str, output: str, size: int
) -> None:
    if script == "with_lightning.py":
        pytest.importorskip("lightning")
    process = commands(str(SCRIPTS / script), output, "model")
    open_(process)
    assert process.ask("describe", PATIENCE_SECONDS)["batch_size"] == 4 * size
    for each, steps in ((4 * size, 1), (size // 2, ACCUMULATION)):
        assert process.ask("measure", PATIENCE_SECONDS, micro_batch_size=each)["grad_accum_steps"] == 4
        assert (process._data["accumulation"], process._data["accumulation_given"]) == (steps, steps)


def test_all_optimizers_of_a_loop_count(commands: Commands) -> None:
    process = commands(*LOOP)
    open_(process)
    assert process.ask("describe", PATIENCE_SECONDS)["num_parameters"] == 256 * 512 * 2 + 512 + 256


@pytest.mark.parametrize(("steps", "accumulate"), [(12, 1), (3, 2)])
def test_a_loop_that_ends_early_gives_what_it_gave(commands: Commands, steps: int, accumulate: int) -> None:
    process = commands(*LOOP, "--steps", str(steps), "--accumulate", str(accumulate))
    open_(process)
    assert 2 <= measure(process, 4).repeats <= (steps - 1) * accumulate


def test_a_loop_that_fails_early_gives_nothing(commands: Commands) -> None:
    process = commands(*LOOP, "--raise-at", "5")
    open_(process)
    with pytest.raises(TrialFailedError, match="no such step") as caught:
        measure(process, 4)
    assert caught.value.outcome is Outcome.CRASHED


def test_what_is_known_of_one_choice_of_settings_says_nothing_of_another() -> None:
    command = TrainingCommand(("train", "{micro_batch_size}"), "", {"fused": [False, True]}, 8)
    for size in (2, 4):
        with pytest.raises(OtherBatchError):
            command.count({"fused": False}, size, 1)
    with pytest.raises(OtherBatchError):
        command.expect({"fused": False}, 1)
    command.expect({"fused": True}, 1)
    command.expect({"fused": False}, 8)


@pytest.mark.parametrize(
    ("loss", "agrees", "keeps", "said"),
    [
        ("own", True, False, "are the same in micro-batches of 8 and of 2"),
        (
            "contrastive",
            False,
            True,
            "others in its micro-batch: .* So the micro-batch stays 2. Losses with a cache",
        ),
        ("averaged", False, False, "the loss is averaged in each micro-batch.* Another size changes this training"),
        ("router", False, False, "the loss that balances the routers.* Another size changes this training"),
        ("masked", None, False, "was not compared, because the same samples in another order have gradients that"),
    ],
)
def test_a_command_says_whether_its_size_may_change(
    commands: Commands, loss: str, agrees: bool | None, keeps: bool, said: str
) -> None:
    process = commands(str(SCRIPTS / "with_losses.py"), "--loss", loss, "--output_dir", "out")
    process.ask("open", PATIENCE_SECONDS, device="cpu", choice=None, compare_seconds=PATIENCE_SECONDS)
    gradients = process.ask("describe", PATIENCE_SECONDS)["gradients"]
    assert (gradients["agrees"], gradients.get("keeps_size", False)) == (agrees, keeps)
    assert re.search(said, gradients["text"])
    assert measure(process, 2).repeats > 1, "trials go on as if nothing had been compared"
    assert process._data["accumulation"] == ACCUMULATION


@pytest.mark.parametrize(
    ("arguments", "seconds", "said"),
    [
        (LOOP, PATIENCE_SECONDS, "because the command has a loop of its own: bexp.check_accumulation compares"),
        ((str(SCRIPTS / "with_losses.py"), "--output_dir", "out"), 0.0, "because that takes too long"),
    ],
)
def test_what_is_not_compared_says_why(
    commands: Commands, arguments: tuple[str, ...], seconds: float, said: str
) -> None:
    process = commands(*arguments)
    process.ask("open", PATIENCE_SECONDS, device="cpu", choice=None, compare_seconds=seconds)
    gradients = process.ask("describe", PATIENCE_SECONDS)["gradients"]
    assert gradients["agrees"] is None
    assert said in gradients["text"]


def test_a_comparison_leaves_time_for_another_start(commands: Commands) -> None:
    """Else an exploration would fail that could do without it."""
    process = commands(str(SCRIPTS / "with_losses.py"), "--output_dir", "out")
    process.ask("open", PATIENCE_SECONDS, device="cpu", choice=None, compare_seconds=PATIENCE_SECONDS)
    process._start_seconds = PATIENCE_SECONDS
    gradients = process.ask("describe", PATIENCE_SECONDS)["gradients"]
    assert "because that takes too long" in gradients["text"]
    assert measure(process, 2).repeats > 1
