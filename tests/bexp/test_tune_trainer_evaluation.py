"""What an evaluation of transformers' Trainer needs on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from bexp.tune import trainer_evaluation
from bexp.tune.trainer_evaluation import evaluate_longest

VOCABULARY, LENGTH, TEXTS = 96, 16, 40


def no_metrics(_: Any, compute_result: bool = True) -> dict[str, float]:
    return {}


@pytest.mark.parametrize(
    ("fields", "copies"),
    [
        ({}, 2 * 9),
        ({"eval_accumulation_steps": 3}, 2 * 2),
        ({"eval_do_concat_batches": False}, 9),
        ({"prediction_loss_only": True}, 0),
        ({"batch_eval_metrics": True}, 0),
    ],
)
def test_outputs_of_all_batches_count_where_metrics_are_computed_of_them(
    fields: dict[str, Any], copies: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_evaluation, "peak_bytes", lambda _: (1000, None))
    monkeypatch.setattr(trainer_evaluation, "reset_peak", lambda _: None)
    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=VOCABULARY, use_cache=False))
    texts = [{"input_ids": torch.arange(LENGTH), "labels": torch.arange(LENGTH)} for _ in range(TEXTS)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_eval_batch_size=4, use_cpu=True, report_to=[], **fields
    )
    trainer = Trainer(model=model, args=arguments, eval_dataset=texts, compute_metrics=no_metrics)
    one = 4 * LENGTH * (VOCABULARY * 4 + 8)
    assert evaluate_longest(trainer)["peak_bytes"] == 1000 + copies * one
