"""What runs with an answer gets its sizes from within, and says how the promise was kept."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.loss.loss_utils import ForCausalLMLoss

from bexp.transformers.settings import Settings
from bexp.tune.environment import on_device, with_hook
from bexp.tune.link import CHOICE, PROMISE, SIZE, STEPS
from bexp.tune.placeholders import APPLY_VALUES, apply_lines, settings_of
from bexp.tune.promise import say_kept

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
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss

def make(size, steps):
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=256))
    arguments = TrainingArguments("out", per_device_train_batch_size=size, gradient_accumulation_steps=steps)
    args = Trainer(model, arguments).args
    is_applied = model.loss_function is not ForCausalLMLoss
    return args.per_device_train_batch_size, args.gradient_accumulation_steps, str(args.optim), is_applied

print(make(4, 2), make(16, 2), make(4, 2))
"""


def run(folder: Path, script: str, size: int, steps: int | None, **named: str) -> subprocess.CompletedProcess[str]:
    own = {SIZE: str(size), CHOICE: json.dumps({"optim": "adafactor", **named})}
    own |= {PROMISE: json.dumps({"tokens_per_second": 1e9, "tokens_per_sample": 1, "has_size": False})}
    own |= {} if steps is None else {STEPS: str(steps)}
    environment = on_device(with_hook(os.environ), "cpu") | own
    return subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_a_loop_of_accelerates_gets_size_and_accumulation_in_its_first_loader(tmp_path: Path) -> None:
    script = LOOP.replace("OWN", "4").replace("BEGIN", "accelerator.accumulate(model)")
    done = run(tmp_path, script, 8, 2)
    assert done.stdout.split("\n")[0] == "8 20 [2, 4] 4", done.stderr
    assert "bexp: " not in done.stderr, "ten steps are too few"


def test_a_loop_that_does_not_accumulate_is_ended_and_not_trained_with_another_batch(tmp_path: Path) -> None:
    script = LOOP.replace("OWN", "1").replace("BEGIN", "torch.enable_grad()")
    done = run(tmp_path, script, 2, 2)
    assert done.returncode == 1
    assert "CannotApplyError: the answer needs 2 accumulation steps, but this loop has 1" in done.stderr
    one = run(tmp_path, script, 2, 1)
    assert one.stdout.split("\n")[0] == "2 80 [1, 2] 4", one.stderr
    assert re.search(
        r"bexp: \d+ optimizer steps ran at [\d,]+ samples/s, 0.00 \+- 0.00 of the 1,000,000,000", one.stderr
    )


def test_a_loop_that_nothing_has_set_is_ended(tmp_path: Path) -> None:
    done = run(tmp_path, PLAIN, 8, 2)
    assert done.returncode == 1
    assert "CannotApplyError: nothing in this command has taken the size" in done.stderr


@pytest.mark.parametrize(("steps", "value"), [(3, "loss"), (None, "none")])
def test_trainers_with_the_sizes_of_the_first_get_the_answer(tmp_path: Path, steps: int | None, value: str) -> None:
    done = run(tmp_path, TRAINERS, 8, steps, bexp_apply=value)
    answer = (8, steps or 2, "adafactor", value == "loss")
    assert done.stdout.strip() == f"{answer} (16, 2, 'OptimizerNames.ADAMW_TORCH_FUSED', False) {answer}", done.stderr


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
