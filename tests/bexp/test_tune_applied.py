"""What runs with an answer gets its sizes from within, and says how the promise was kept."""

from __future__ import annotations

import json
import re
import subprocess
from types import SimpleNamespace

import pytest
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.loss.loss_utils import ForCausalLMLoss

from bexp.transformers.settings import Settings
from bexp.tune.link import CHOICE, PROMISE, SIZE, STEPS
from bexp.tune.placeholders import APPLY_VALUES, apply_lines, settings_of
from bexp.tune.promise import MOST, _Steps, say_kept
from tests.forked_ranks import run_ranks

LOOP = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(gradient_accumulation_steps=OWN)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = DataLoader(TensorDataset(torch.randn(160, 4)), batch_size=4, shuffle=True)
other = DataLoader(TensorDataset(torch.randn(160, 4)), batch_size=4)
model, optimizer, loader, other = accelerator.prepare(model, optimizer, loader, other)
seen, steps = [], []
optimizer.optimizer.register_step_post_hook(lambda *_: steps.append(len(seen)))
for (x,) in loader:
    seen.append(len(x))
    with BEGIN:
        accelerator.backward(model(x).sum())
        optimizer.step()
        optimizer.zero_grad()
print(seen[0], len(loader), steps[:2], len(next(iter(other))[0]))
"""
PLAIN = """
import torch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(20):
    model(torch.randn(4, 4)).sum().backward()
    optimizer.step()
"""
TRAINERS = """
import torch
from transformers import Trainer, TrainingArguments

def make(size, steps, data=[0]):
    arguments = TrainingArguments("out", per_device_train_batch_size=size, gradient_accumulation_steps=steps)
    trainer = Trainer(torch.nn.Linear(4, 4), arguments, train_dataset=data)
    return trainer._train_batch_size, trainer.args.gradient_accumulation_steps, str(trainer.args.optim)

make(16, 2, None)
print(make(4, 2), make(16, 2), make(4, 2))
"""
GENERATES = TRAINERS.replace("    trainer =", "    arguments.steps_per_generation = steps\n    trainer =")
OTHER_TRAINS = TRAINERS.replace("return", "trainer.train() if size == 16 and data else None; return")


LOSSES = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss

def is_applied(size):
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=256))
    Trainer(model, arguments[size], train_dataset=[0])
    return model.loss_function is not ForCausalLMLoss

arguments = {size: TrainingArguments("out", per_device_train_batch_size=size) for size in (4, 16)}
print(is_applied(4), is_applied(16), is_applied(4))
"""


FINDERS = """
import torch
from accelerate.utils.memory import find_executable_batch_size
from transformers import Trainer, TrainerCallback, TrainingArguments

@find_executable_batch_size(starting_batch_size=16)
def train(batch_size, fails):
    if fails: raise RuntimeError("CUDA out of memory.")
    return batch_size

print(train(False))
try:
    train(True)
except RuntimeError as error:
    print(error)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
    def forward(self, x):
        return {"loss": self.layer(x).sum()}

class Changes(TrainerCallback):
    def on_step_end(self, args, state, *_, **__):
        if state.global_step == 2: args.gradient_accumulation_steps = 5

arguments = TrainingArguments("out", auto_find_batch_size=True, report_to=[], use_cpu=True, save_strategy="no")
arguments.optim = "adafactor"
trainer = Trainer(Model(), arguments, train_dataset=[{"x": torch.ones(4)}] * 160, callbacks=[Changes()])
print(trainer.args.auto_find_batch_size)
trainer.train()
"""


ACCUMULATES = LOOP.replace("BEGIN", "accelerator.accumulate(model)")
DOES_NOT = LOOP.replace("OWN", "1").replace("BEGIN", "torch.enable_grad()")
BY_ITSELF = DOES_NOT.replace("        optimizer.", "        if len(seen) % 4 == 0: optimizer.")
SCALED = """
import torch

parameter = torch.nn.Parameter(torch.ones(1))
optimizer, scaler = torch.optim.SGD([parameter], 0.1), torch.amp.GradScaler("cpu", enabled=True)
for step in range(12):
    scaler.scale(parameter.sum() * (float("inf") if step % 4 in (1, 2) else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
print("trained")
"""
EVALUATES_FIRST = ACCUMULATES.replace("loader, other = acc", "other, loader = acc").replace(
    "optimizer, loader, other)", "optimizer, other, loader)"
)
PRIOR_FIRST = ACCUMULATES.replace("batch_size=4)", "batch_size=2)").replace(
    "model, optimizer, loader, other =", "other = accelerator.prepare(other)\nmodel, optimizer, loader, _ ="
)
OWN_BATCHES = DOES_NOT.replace("batch_size=4, shuffle=True", "batch_sampler=[[0, 1]] * 20")
SCRIPTS: dict[str, tuple[str, int, int | None, dict[str, str]]] = {
    "accumulates": (ACCUMULATES.replace("OWN", "1"), 8, 2, {}),
    "accumulates by itself": (ACCUMULATES.replace("OWN", "4"), 8, 2, {}),
    "evaluates first": (EVALUATES_FIRST.replace("OWN", "4"), 8, 2, {}),
    "a prior with braces": (PRIOR_FIRST.replace("OWN", "4"), 4, 2, {}),
    "does not accumulate": (DOES_NOT, 2, 2, {}),
    "need not accumulate": (DOES_NOT, 2, 1, {}),
    "plain": (PLAIN, 8, 2, {}),
    "own batches": (OWN_BATCHES, 8, 1, {}),
    "accumulates in its script": (BY_ITSELF, 2, 1, {}),
    "with its size": (PLAIN, 8, 2, {}),
    "overflows with its size": (SCALED, 8, 1, {}),
    "trainers": (TRAINERS, 8, 3, {}),
    "another trainer trains": (OTHER_TRAINS, 8, 3, {}),
    "trainers that generate": (GENERATES, 8, 3, {}),
    "trainers with their steps": (TRAINERS, 8, None, {}),
    "loss": (LOSSES, 8, 1, {"bexp_apply": "loss"}),
    "finders": (FINDERS, 8, 1, {}),
    "no loss": (LOSSES, 8, 1, {"bexp_apply": "none"}),
}
"""Each with its size, its steps, and what is chosen beside them."""

Done = dict[str, subprocess.CompletedProcess[str]]
pytestmark = pytest.mark.slow(together="forked")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """How each script has ended."""
    folder, asked = tmp_path_factory.mktemp("scripts"), {}
    for name, (script, size, steps, chosen) in SCRIPTS.items():
        speed = {"tokens_per_second": 1e9, "tokens_per_sample": 1}
        has = {"has_size": "its size" in name or "braces" in name, "has_braces": "braces" in name}
        promise = json.dumps(speed | has)
        own = {SIZE: str(size), CHOICE: json.dumps({"optim": "adafactor", **chosen}), PROMISE: promise}
        asked[name] = script, own if steps is None else own | {STEPS: str(steps)}
    (folder / "scripts.json").write_text(json.dumps(asked))
    run_ranks("tests.bexp.applied_scripts", folder)

    def read(name: str, ending: str) -> str:
        return (folder / f"{name}.{ending}").read_text()

    return {
        name: subprocess.CompletedProcess(name, int(read(name, "code")), read(name, "out"), read(name, "err"))
        for name in SCRIPTS
    }


@pytest.mark.parametrize("name", ["accumulates", "accumulates by itself", "evaluates first"])
def test_a_loop_of_accelerates_gets_size_and_accumulation_in_its_first_loader(done: Done, name: str) -> None:
    assert done[name].stdout.split("\n")[0] == "8 20 [2, 4] 4", done[name].stderr
    assert "bexp: " not in done[name].stderr, "ten steps are too few"


def test_a_loader_of_another_size_than_the_one_in_braces_keeps_it(done: Done) -> None:
    name = "a prior with braces"
    assert done[name].stdout.split("\n")[0] == "4 40 [2, 4] 2", done[name].stderr


def test_a_loop_that_does_not_accumulate_is_ended_and_not_trained_with_another_batch(done: Done) -> None:
    one = done["need not accumulate"]
    for name, needed, has in (
        ("does not accumulate", 2, 1),
        ("accumulates in its script", 1, 4),
        ("with its size", 2, 1),
    ):
        assert done[name].returncode == 1
        said = f"CannotApplyError: the answer needs {needed} accumulation steps, but this loop has {has} micro-batches"
        assert said in done[name].stderr
    assert done["overflows with its size"].stdout == "trained\n", done["overflows with its size"].stderr
    assert one.stdout.split("\n")[0] == "2 80 [1, 2] 4", one.stderr
    assert re.search(
        r"bexp: \d+ optimizer steps ran at [\d,]+ samples/s, 0.00 \+- 0.00 of the 1,000,000,000", one.stderr
    )


@pytest.mark.parametrize("name", ["plain", "own batches"])
def test_a_loop_that_nothing_has_set_is_ended(done: Done, name: str) -> None:
    assert done[name].returncode == 1
    assert "CannotApplyError: nothing in this command has taken the size" in done[name].stderr


@pytest.mark.parametrize(("name", "steps"), [("trainers", 3), ("trainers with their steps", 2)])
def test_trainers_with_the_sizes_of_the_first_get_the_answer(done: Done, name: str, steps: int) -> None:
    answer = (8, steps, "adafactor")
    expected = f"{answer} (16, 2, 'OptimizerNames.ADAMW_TORCH_FUSED') {answer}"
    assert done[name].stdout.strip() == expected, done[name].stderr


@pytest.mark.parametrize(("name", "is_applied"), [("loss", "True"), ("no loss", "False")])
def test_the_trainer_that_gets_the_answer_has_its_model_set_up(done: Done, name: str, is_applied: str) -> None:
    assert done[name].stdout.strip() == f"{is_applied} False {is_applied}", done[name].stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("another trainer trains", "has micro-batches of 16 and 2 accumulation steps, and not the answer's 8 and 3"),
        ("trainers that generate", "takes its sizes when TrainingArguments are made: put {micro_batch_size} and"),
    ],
)
def test_a_training_with_other_sizes_than_the_answers_is_ended(done: Done, name: str, said: str) -> None:
    assert (done[name].returncode, done[name].stdout) == (1, "")
    assert said in done[name].stderr


def test_what_would_find_or_set_another_size_is_off_or_ends_the_run(done: Done) -> None:
    assert done["finders"].stdout.split("\n")[:3] == ["16", "CUDA out of memory.", "False"], done["finders"].stderr
    for name in ("find_executable_batch_size", "auto_find_batch_size"):
        assert (
            done["finders"].stderr.count(f"bexp: {name} is off in this run, because it could change the batch\n") == 1
        )
    assert done["finders"].returncode == 1
    assert "CannotApplyError: the command has changed its sizes to micro-batches of 8 and 5" in done["finders"].stderr


def test_the_lines_of_python_do_in_a_script_what_the_trial_did() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=256))
    lines = apply_lines("loss", 4)
    assert lines[1] == (
        "bexp.apply(trainer.model, bexp.RecommendedSetup(bexp.Settings(loss='chunked'), micro_batch_size=4))"
    )
    exec("\n".join(lines), {"trainer": SimpleNamespace(model=model)})
    assert model.loss_function is not ForCausalLMLoss
    assert apply_lines("none", 4) == []
    assert len(lines) == 2


def test_each_value_has_its_settings() -> None:
    found = [settings_of(value) for value in APPLY_VALUES]
    assert len(set(found)) == 8
    assert found[0] == Settings()
    assert found[-1] == Settings(experts="bexp_fused", loss="chunked", compile=True)


def test_steps_that_saved_do_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    say_kept([(0.1, 2), (0.1, 2), (5.0, 2), (0.1, 2)], 4, 800.0, 10)
    assert capsys.readouterr().err == (
        "\nbexp: 3 optimizer steps ran at 800 tokens/s, 1.00 +- 0.00 of the 800 that were promised\n"
    )


def test_what_a_run_saves_and_evaluates_between_two_steps_is_in_no_steps_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, said = [0.0], list[list[float]]()
    promised = {"has_size": True, "tokens_per_second": 1.0, "tokens_per_sample": 1.0}
    monkeypatch.setenv(PROMISE, json.dumps(promised))
    monkeypatch.setenv(SIZE, "2")
    monkeypatch.setattr("bexp.tune.promise.now", lambda: clock[0])
    monkeypatch.setattr("bexp.tune.promise.say_kept", lambda timed, *_: said.append([seconds for seconds, _ in timed]))
    monkeypatch.setattr(_Steps, "_count_micro_steps", lambda _: None)
    steps, optimizer = _Steps(), object()
    while not said:
        clock[0] += 1.0
        steps.end_step(optimizer)
        clock[0] += 9.0
        steps.begin_again()
    assert said == [[1.0] * MOST]
