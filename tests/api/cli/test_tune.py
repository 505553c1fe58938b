"""What `bexp tune` says of a command, and what it keeps to itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bexp.api.cli.errors import CommandError, ExitCode
from bexp.api.cli.tune import _read_try, check_startable, hide_secrets, name_command
from bexp.api.cli.tune_answer import LOOP, Speed, TuneAnswer
from bexp.api.cli.tuned_command import TunedCommand
from bexp.tune import link
from tests.api.cli.conftest import Started
from tests.api.cli.samples import BEST


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        (["--hub_token", "abc", "--lr", "1"], ["--hub_token", "...", "--lr", "1"]),
        (["--hub-token=abc"], ["--hub-token=..."]),
        (["--wandb_key", "abc", "--text_key", "body"], ["--wandb_key", "...", "--text_key", "body"]),
        (["AWS_SECRET_ACCESS_KEY=abc"], ["AWS_SECRET_ACCESS_KEY=..."]),
        (['--x={"hub_token": "a b", "lr": 1}'], ['--x={"hub_token": ..., "lr": 1}']),
        (["bash", "-c", "HF_TOKEN='a b' python train.py"], ["bash", "-c", "HF_TOKEN=... python train.py"]),
        (["--wandb_api_key=abc"], ["--wandb_api_key=..."]),
        (["--password", "--x"], ["--password", "..."]),
        (["hf_abcdef"], ["..."]),
        (["--data=s3://user:pass@host/x"], ["--data=s3://...@host/x"]),
        (["--max_tokens=5", "--tokenizer_name", "x"], ["--max_tokens=5", "--tokenizer_name", "x"]),
        (["env", "HF_TOKEN=hf_abc", "hub_token=zzz"], ["env", "HF_TOKEN=...", "hub_token=..."]),
        (["wandb.api_key=aaa"], ["wandb.api_key=..."]),
        (["bash", "-c", "HF_TOKEN=abc python train.py --lr=1"], ["bash", "-c", "HF_TOKEN=... python train.py --lr=1"]),
        (["train.py", "--batch", "4"], ["train.py", "--batch", "4"]),
        (["token", "count"], ["token", "count"]),
    ],
)
def test_what_looks_like_a_secret_is_not_stored(argument: list[str], shown: list[str]) -> None:
    assert hide_secrets(argument) == shown


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["accelerate", "launch", "--num_processes", "2", "dir/train.py", "--x", "1"], "train"),
        (["axolotl", "train", "my-config.yaml"], "my-config"),
        (["/usr/bin/torchrun", "--help"], "torchrun"),
        (["python", "-m", "package.trainer", "--x", "1"], "trainer"),
        (["python", "-X", "dev", "-m", "trainer", "settings.json"], "settings"),
    ],
)
def test_a_command_has_the_name_of_its_script_or_settings(command: list[str], name: str) -> None:
    assert name_command(command) == name


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["python", "trian.py", "--x", "other.py"], "there is no script 'trian.py' in /"),
        (["accelerate", "launch", "--num_processes", "2", "dir/trian.py"], "there is no script 'dir/trian.py' in /"),
        (["/no/such/python", "train.py"], "there is no program '/no/such/python'"),
        (["python", "train.py", "--log", "new.py"], None),
        (["python", "-m", "trainer", "--log", "new.py"], None),
        (["python", "-c", "open('x').read()", "new.py"], None),
        (["env", "--chdir=dir", "python", "trian.py"], None),
        (["./run", "--x"], None),
        (["run", "--x"], "there is no program 'run'"),
    ],
)
def test_a_mistyped_script_is_told_at_once(
    command: list[str], said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "bin").mkdir()
    for program in ("bin/python", "bin/accelerate", "bin/env", "run"):
        (tmp_path / program).touch(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    if said is None:
        check_startable(command)
        return
    with pytest.raises(CommandError) as caught:
        check_startable(command)
    assert caught.value.code is ExitCode.USAGE
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("values", "read"),
    [
        ("true,false,null", [True, False, None]),
        ("adamw_torch_fused,no,12:30", ["adamw_torch_fused", "no", "12:30"]),
        ("1e-4,.5,-2,010,1_000", [1e-4, 0.5, -2, 10, "1_000"]),
    ],
)
def test_values_to_try_are_plain_data_unless_they_stand_in_the_command(values: str, read: list[Any]) -> None:
    name, found = _read_try(f"x={values}", ["train.py", "--x"])
    assert (name, list(map(repr, found))) == ("x", list(map(repr, read)))
    assert _read_try(f"x={values}", ["train.py", "y={x}"]) == ("x", values.split(","))


@pytest.mark.parametrize("wrong", ["optim", "=1", "optim=", "a b=1"])
def test_a_setting_to_try_has_a_name_and_values(wrong: str) -> None:
    with pytest.raises(CommandError, match="NAME=A,B"):
        _read_try(wrong, ["train.py"])


SPEED = Speed(BEST, 100.0, None, 1)


@pytest.mark.parametrize(
    ("device", "visible", "class_name"),
    [(None, "5,7", "Trainer"), ("cuda:0-1", "5,7", "Trainer"), ("cuda:1", "7", LOOP), ("cpu", "", "model")],
)
def test_the_command_runs_on_the_device_that_was_named_unless_it_shares_out_several(
    device: str | None,
    visible: str,
    class_name: str,
    started: Started,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    answer = TuneAnswer(SPEED, SPEED, 2, 8, {}, {}, class_name, 0)
    answer.run(TunedCommand(["python", "train.py"]), device, None)
    ((arguments, environment),) = started
    assert arguments[:2] == ["python", "train.py"]
    assert (environment["CUDA_VISIBLE_DEVICES"], environment[link.SIZE], environment[link.STEPS]) == (visible, "4", "2")
    assert ("such as a number of steps, does not change" in capsys.readouterr().err) == (class_name == LOOP)


@pytest.mark.parametrize(
    ("given", "becomes", "has_size"),
    [
        ("train.py", "train.py", False),
        ("train.py --per_device_train_batch_size 1", "train.py --per_device_train_batch_size 4", True),
        ("train.py {micro_batch_size} {grad_accum_steps} {lr}", "train.py 4 1 0.5", True),
    ],
)
def test_the_command_learns_what_was_promised_and_which_settings_it_lacks(
    given: str, becomes: str, has_size: bool, started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody knows its batch, so that there are no steps."""
    answer = TuneAnswer(SPEED, SPEED, None, None, {}, {"lr": 0.5, "optim": "sgd"}, LOOP, 0)
    answer.run(TunedCommand(["python", *given.split()]), None, None)
    ((arguments, environment),) = started
    assert arguments == ["python", *becomes.split()]
    promise = {"tokens_per_second": 100.0, "tokens_per_sample": 1, "has_size": has_size}
    assert json.loads(environment[link.PROMISE]) == promise | {"has_braces": "{micro_batch_size}" in given}
    assert json.loads(environment[link.CHOICE]) == {"optim": "sgd"} | ({} if "{lr}" in given else {"lr": 0.5})
    assert link.STEPS not in environment
    assert ("does not change" in capsys.readouterr().err) is not has_size


def test_a_command_whose_batch_no_size_divides_is_not_started(started: Started) -> None:
    answer = TuneAnswer(SPEED, SPEED, None, 6, {}, {}, "Trainer", 0)
    with pytest.raises(CommandError, match="no size that was tried divides the batch of 6") as caught:
        answer.run(TunedCommand(["python", "train.py"]), None, None)
    assert (caught.value.code, started) == (ExitCode.NO_ANSWER, [])
