from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bexp
from tests.bexp.trainer.recommendations import document
from tests.bexp.transformers import models

pytest.importorskip("accelerate", reason="transformers' Trainer needs it")


def train(folder: Path, *, tuned: bool) -> tuple[list[float], Any]:
    from transformers import Trainer, TrainingArguments

    told = document()
    told["job"]["request"]["model"]["dtype"] = "float32"
    told["job"]["request"]["batch_size"] = 8
    model = models.tiny("olmoe")
    callback = bexp.TrainerCallback(told)
    if tuned:
        bexp.apply(model, told)
    rows = models.batch(48)
    dataset = [{key: value[i] for key, value in rows.items()} for i in range(48)]
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        report_to=[],
        logging_steps=1,
        max_steps=6,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        save_strategy="no",
        **bexp.training_arguments(told, world_size=1),
    )
    trainer = Trainer(model, arguments, train_dataset=dataset, callbacks=[callback])
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], callback


@pytest.mark.filterwarnings("default")
def test_a_trainer_reaches_the_same_losses_on_a_model_that_is_set_up(tmp_path: Path) -> None:
    plain, _ = train(tmp_path / "plain", tuned=False)
    tuned, callback = train(tmp_path / "tuned", tuned=True)
    assert len(plain) == 6
    assert tuned == pytest.approx(plain, rel=1e-3)
    assert callback.report.steps == 3
    assert callback.report.applied
    assert callback.report.micro_batch_size == 4
    assert torch.isfinite(torch.tensor(callback.report.tokens_per_second))
