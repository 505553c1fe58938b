"""What is to be changed in a command, wherever its settings stand."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bexp.api.cli.errors import CommandError, ExitCode
from bexp.api.cli.tune_answer import LOOP, Speed, TuneAnswer, _best, check_writable
from bexp.api.cli.tuned_command import SIZE, STEPS, TunedCommand
from bexp.api.cli.yaml_lines import UnchangeableError
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.records.recommendation import Role
from bexp.tune.placeholders import APPLY
from tests.contracts.samples import make_recommendation
from tests.explorer.alternatives import alternative

VALUES = {SIZE: 8, STEPS: 4}


def changes(command: str, own: dict[str, Any] | None = None, **more: Any) -> list[str]:
    return TunedCommand(shlex.split(command)).changes(VALUES, own or {}, **more)


@pytest.mark.parametrize(
    ("command", "lines", "run"),
    [
        (
            "python train.py --per_device_train_batch_size 4 --lr 1 --gradient_accumulation_steps=8",
            ["--per_device_train_batch_size 4 -> 8", "--gradient_accumulation_steps 8 -> 4"],
            "python train.py --per_device_train_batch_size 8 --lr 1 --gradient_accumulation_steps=4",
        ),
        (
            "accelerate launch --gradient_accumulation_steps 2 train.py --gradient-accumulation-steps 8",
            ["add --per_device_train_batch_size 8", "--gradient-accumulation-steps 8 -> 4"],
            "accelerate launch --gradient_accumulation_steps 2 train.py --gradient-accumulation-steps 4",
        ),
        (
            "python -m torch.distributed.run --nproc 2 -m my.train --per_device_train_batch_size 8 --x",
            ["add --gradient_accumulation_steps 4"],
            "python -m torch.distributed.run --nproc 2 -m my.train --per_device_train_batch_size 8 --x",
        ),
        (
            "trl sft --gradient_accumulation_steps 1 --gradient_accumulation_steps 2",
            ["add --per_device_train_batch_size 8", "--gradient_accumulation_steps 2 -> 4"],
            "trl sft --gradient_accumulation_steps 4 --gradient_accumulation_steps 4",
        ),
    ],
)
def test_flags_that_change_are_told_and_changed(command: str, lines: list[str], run: str) -> None:
    assert changes(command) == lines
    assert shlex.join(TunedCommand(shlex.split(command)).with_flags(VALUES)) == run


def test_what_is_right_already_is_not_told() -> None:
    assert changes("python train.py --per_device_train_batch_size 8", {STEPS: 4}) == []
    assert changes("python train.py", {SIZE: 8, STEPS: 2}) == [f"{STEPS} 2 -> 4 in the script"]


def test_a_flag_without_a_value_gets_one() -> None:
    command = TunedCommand(["python", "train.py", "--gradient_checkpointing", "--x"])
    assert command.changes({"gradient_checkpointing": False}, {}) == ["--gradient_checkpointing (set) -> false"]
    assert command.with_flags({"gradient_checkpointing": False})[2:] == ["--gradient_checkpointing=false", "--x"]


@pytest.mark.parametrize(
    ("start", "size"),
    [
        ("axolotl train", "micro_batch_size"),
        ("accelerate launch -m axolotl.cli.train", "micro_batch_size"),
        ("/opt/bin/llamafactory-cli train", SIZE),
    ],
)
def test_the_keys_of_a_yaml_are_told_and_changed(tmp_path: Path, start: str, size: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(f"{size}: 2  # two\nseed: 1\n")
    command = TunedCommand([*start.split(), str(path), "--flag"])
    assert command.changes(VALUES, {}) == [f"{size}: 2 -> 8 in {path}", f"add {STEPS}: 4 to {path}"]
    assert command.changed_yaml(VALUES) == f"{size}: 8  # two\nseed: 1\n{STEPS}: 4\n"
    written = command.with_flags(VALUES, Path("y.yaml"))
    assert written == [*start.split(), "y.yaml", "--flag"]


def test_what_cannot_be_written_is_told_before_anything_is_run(tmp_path: Path) -> None:
    path, there = tmp_path / "x.yaml", tmp_path / "there.yaml"
    command = TunedCommand(["axolotl", "train", str(path)])

    def said(out: Path) -> str:
        with pytest.raises(CommandError) as refused:
            check_writable(command, out)
        assert refused.value.code == ExitCode.USAGE
        return str(refused.value)

    assert said(tmp_path / "new.yaml") == f"--write: {path}: No such file or directory"
    path.write_text("- a list\n")
    assert said(tmp_path / "new.yaml") == f"--write: {path}: it is no mapping of names to values"
    path.write_text("micro_batch_size: 2\n")
    there.touch()
    assert said(there) == f"--write {there}: it exists"
    nowhere = tmp_path / "none"
    assert said(nowhere / "new.yaml") == f"--write {nowhere}/new.yaml: there is no folder {nowhere}"
    check_writable(command, tmp_path / "new.yaml")
    assert not (tmp_path / "new.yaml").exists()


def test_what_overrides_a_yaml_is_told_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(f"{SIZE}: 2\n{STEPS}: 4\noptim: adamw\n")
    command = TunedCommand(["llamafactory-cli", "train", str(path), f"{SIZE}=1"])
    assert command.changes({**VALUES, "optim": "adafactor"}, {}) == [
        f"{SIZE} 1 -> 8",
        f"optim: adamw -> adafactor in {path}",
    ]
    assert command.with_flags(VALUES)[-1] == f"{SIZE}=8"


def test_a_word_that_is_named_like_a_field_is_no_flag() -> None:
    command = TunedCommand(["python", "train.py", SIZE, "4"])
    assert not command.has_flag(SIZE)
    assert TunedCommand(["python", "train.py", f"--{SIZE}", "4"]).has_flag(SIZE)
    for script in (["train.py"], ["-m", "train"]):
        assert not TunedCommand(["launch", f"--{SIZE}=4", *script]).has_flag(SIZE), "it is of what launches the script"
        assert TunedCommand(["launch", *script, f"{SIZE}=4"]).has_flag(SIZE)


def test_other_commands_have_no_yaml_to_change() -> None:
    for command in ("python train.py config.yaml", "python train.py --name axolotl config.yaml", "axolotl train"):
        with pytest.raises(UnchangeableError, match="reads no YAML"):
            TunedCommand(command.split()).changed_yaml(VALUES)


def test_what_apply_did_is_told_as_lines_of_python_and_not_as_a_flag() -> None:
    command = TunedCommand(["python", "train.py", "--optim", "sgd"])
    own = {SIZE: 8, STEPS: 2, "optim": "sgd"}
    choice = {"optim": "sgd", APPLY: "loss"}
    speed = Speed(Candidate(micro_batch_size=8, attention_backend="own", num_query_groups=1), 100.0, None, 1)
    answer = TuneAnswer(speed, speed, 2, 16, own, choice, "GPT2LMHeadModel", 0)
    assert [line.strip().removeprefix("before train()").strip() for line in answer.rows(command)] == [
        "import bexp",
        "bexp.apply(trainer.model, bexp.RecommendedSetup(bexp.Settings(loss='chunked'), micro_batch_size=8))",
    ]
    assert answer.values == {SIZE: 8, STEPS: 2, "optim": "sgd"}, "a YAML has no key for it"


def test_the_answer_is_the_candidate_that_keeps_the_batch() -> None:
    """The fastest one may not divide it: then it has no accumulation steps, and the other has."""
    fastest = make_recommendation(3)
    figures = {"grad_accum_steps": 4, "tokens_per_second": 900.0}
    dividing = alternative(Role.DIVIDING, make_recommendation(2).candidate, **figures)
    of_both = fastest.model_copy(update={"grad_accum_steps": None, "alternatives": (dividing,)})
    assert _best(of_both) == (dividing.candidate, 900.0, 4)
    assert _best(of_both.model_copy(update={"alternatives": ()})) == (fastest.candidate, 1000.0, None)
    assert _best(of_both.model_copy(update={"grad_accum_steps": 8})) == (fastest.candidate, 1000.0, 8)


def test_a_batch_that_nobody_states_has_no_steps() -> None:
    """The size stands in the command, and the first that was measured is no size of its own."""
    parts = SimpleNamespace(micro_batch_size=4, seq_length=1, batch_size=None, class_name=None)
    job = SimpleNamespace(recommendation=make_recommendation(), report=SimpleNamespace(parts=parts))
    best = job.recommendation.candidate
    counts = SimpleNamespace(components=[SimpleNamespace(grad_accum_steps=steps) for steps in (None, 3)])
    trial = SimpleNamespace(candidate=best, measurement=counts, measured_peak_bytes=None)
    stored: Any = SimpleNamespace(get=lambda _: job, trials=lambda _: [trial])
    answer = TuneAnswer.find(stored, "j", {}, None)
    assert answer is not None
    assert answer.own == {SIZE: 4}
    rows = "\n".join(answer.rows(TunedCommand(["python", "t.py", "{micro_batch_size}"])))
    assert "before  " not in rows
    assert f"{best.micro_batch_size} x 3 in an optimizer step, as counted" in rows


SLOW = Candidate(micro_batch_size=1, attention_backend="own", num_query_groups=1)
FAST = SLOW.model_copy(update={"micro_batch_size": 8})


def rows(command: str, **changes: Any) -> list[tuple[str, str]]:
    """What an answer of 8 sequences in two steps says, as labels with texts."""
    known: dict[str, Any] = {"steps": 2, "batch_size": 16, "own": {SIZE: 1, STEPS: 16}, "choice": {}}
    answer = TuneAnswer(
        best=Speed(FAST, 12_345.6, 5 << 30, changes.pop("length", 32)),
        base=Speed(changes.pop("base", SLOW), 99.96, None, changes.pop("base_length", 32)),
        **known | {"class_name": "Trainer", "most_bytes": 0} | changes,
    )
    return [
        (label.strip(), text)
        for label, text in (line.split("\t") for line in answer.rows(TunedCommand(command.split())))
    ]


@pytest.mark.parametrize(
    ("command", "told", "more"),
    [
        (f"python train.py --{SIZE} 1", [("for the command", f"--{SIZE} 1 -> 8"), ("", f"add --{STEPS} 2")], {}),
        ("python train.py {micro_batch_size}", [("for the command", "{micro_batch_size} = 8")], {}),
        (
            "python train.py {micro_batch_size} {grad_accum_steps}",
            [("for the command", "{micro_batch_size} = 8, {grad_accum_steps} = 2")],
            {},
        ),
        (
            "python train.py {micro_batch_size} --lr={lr}",
            [
                ("for the command", "{micro_batch_size} = 8, {lr} = 0.5"),
                ("", "optim sgd in the script or its arguments"),
            ],
            {"choice": {"lr": 0.5, "optim": "sgd"}, "steps": None},
        ),
        (
            "python train.py",
            [("for the command", "micro-batch 1 -> 8 in the script"), ("", "accumulation steps 16 -> 2 in the script")],
            {"class_name": LOOP},
        ),
        (
            "python train.py --output_dir out",
            [("for the command", f"add --{SIZE} 8"), ("", f"add --{STEPS} 2")],
            {"class_name": "my_trainer"},
        ),
        (
            "python train.py run.yaml --lr 1",
            [
                ("for the command", f"{SIZE} 1 -> 8 in the script or its arguments or run.yaml"),
                ("", f"{STEPS} 16 -> 2 in the script or its arguments or run.yaml"),
            ],
            {},
        ),
        (
            "accelerate launch --num_processes 1 train.py --bs 1",
            [
                ("for the command", "micro-batch 1 -> 8 in the script or its arguments"),
                ("", "accumulation steps 16 -> 2 in the script or its arguments"),
            ],
            {"class_name": LOOP},
        ),
        ("python train.py", [("for the command", "nothing to change")], {"own": {SIZE: 8, STEPS: 2}}),
    ],
)
def test_what_to_change_comes_first(command: str, told: list[tuple[str, str]], more: dict[str, Any]) -> None:
    assert [(label, text) for label, text in rows(command, **more) if label in {"for the command", ""}] == told


@pytest.mark.parametrize(
    ("command", "label", "more"),
    [
        ("python train.py", "before", {}),
        ("python train.py {micro_batch_size}", "base", {}),  # the command has no size of its own
        ("python train.py", "base", {"own": {SIZE: 4, STEPS: 4}}),
    ],
)
def test_the_speeds_follow_with_their_peak_memory(command: str, label: str, more: dict[str, Any]) -> None:
    assert rows(command, **more)[-2:] == [
        (label, f"{SLOW.describe()}: 100.0 tokens/s"),
        ("after", f"{FAST.describe()}: 12,346 tokens/s, peak memory 5.0 GiB"),
    ]
    assert {"before", "base", "after"}.isdisjoint(dict(rows(command, **more, base=FAST)))


def test_what_has_no_tokens_is_told_in_samples() -> None:
    assert rows("python train.py", length=1)[-1][1].endswith(": 12,346 samples/s, peak memory 5.0 GiB")
    assert rows("python train.py", length=2)[-1][1].endswith(": 12,346 tokens/s, peak memory 5.0 GiB")


def test_an_answer_knows_what_the_command_asked_for_and_what_fits() -> None:
    """A stated batch tells no steps of the command's own. Of a candidate's trials the highest peak counts."""
    found: Any = make_recommendation()
    tried: Any = [(found.candidate, 300), (found.candidate, 500), (found.candidate, None), (found.base, None)]
    parts: Any = SimpleNamespace(micro_batch_size=4, batch_size=24, seq_length=128, class_name="Trainer")
    tuned = found.candidate.model_copy(update={"settings": "optim=sgd"})
    stored: Any = SimpleNamespace(
        get=lambda _: SimpleNamespace(recommendation=found, report=SimpleNamespace(parts=parts)),
        trials=lambda _: [
            SimpleNamespace(candidate=of, measurement=SimpleNamespace(components=()), measured_peak_bytes=peak)
            for of, peak in tried
        ],
    )
    tries = {"optim": ["adamw", "sgd"]}
    answer = TuneAnswer.find(stored, "j", tries, None)
    assert answer is not None
    assert answer.own == {"optim": "adamw", SIZE: 4, STEPS: 6}
    assert (answer.batch_size, answer.class_name, answer.choice) == (24, "Trainer", {})
    assert (answer.best.peak_bytes, answer.best.tokens_per_sample) == (500, 128)
    assert "peak" not in str(answer.base), "it was not measured as a whole"
    assert answer.base.tokens_per_second == pytest.approx(found.expected_tokens_per_second / 1.2)
    assert answer.most_bytes == (1 << 29) - (1 << 21) + (1 << 20)
    found = found.model_copy(update={"candidate": tuned})
    stated = TuneAnswer.find(stored, "j", tries, 48)
    assert stated is not None
    assert (stated.batch_size, stated.own, stated.choice) == (48, {"optim": "adamw", SIZE: 4}, {"optim": "sgd"})
    assert stated.best.peak_bytes is None
    parts = None
    unknown = TuneAnswer.find(stored, "j", tries, None)
    assert unknown is not None
    assert (unknown.batch_size, unknown.own[SIZE], unknown.best.tokens_per_sample) == (None, None, 1)
    found = None
    assert TuneAnswer.find(stored, "j", tries, None) is None
