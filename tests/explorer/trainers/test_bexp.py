"""The Python module that calls `bexp.apply`."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bexp.explorer.exports.export import export
from bexp.explorer.records.recommendation import TextFigures
from tests.explorer.exports.samples import LENGTHS, candidate, exploration, own_exploration


def test_the_python_module_leaves_the_loss_and_attention_of_a_targets_own_code() -> None:
    scope: dict[str, Any] = {}
    exec(export("python", own_exploration(seq_length=64)).text, scope)
    read = scope["bexp"].RecommendedSetup.read(scope["RECOMMENDATION"])
    assert (read.settings, read.grad_accum_steps(1)) == (scope["bexp"].Settings(), 4)
    assert scope["training_arguments"](output_dir="out", use_cpu=True).per_device_train_batch_size == 4


def test_the_python_module_holds_how_the_model_was_trained() -> None:
    scope: dict[str, Any] = {}
    training = {"optimizer": {"name": "sgd", "master_dtype": None}}
    exec(export("python", exploration(training=training, batch_size=None)).text, scope)
    read = scope["bexp"].RecommendedSetup.read(scope["RECOMMENDATION"])
    assert (read.optimizer, read.dtype, read.autocast, read.master_weights) == ("sgd", "bfloat16", None, False)
    made = scope["training_arguments"](output_dir="out", use_cpu=True, gradient_accumulation_steps=3)
    assert (made.optim, made.optim_args, made.bf16) == ("sgd", "momentum=0.9", False)
    assert made.gradient_accumulation_steps == 3
    exec(export("python", exploration(training={"precision": "master"})).text, scope)
    read = scope["bexp"].RecommendedSetup.read(scope["RECOMMENDATION"])
    assert (read.dtype, read.autocast) == ("float32", "bfloat16"), "bexp.apply has no master weights: the same bytes"


@pytest.mark.parametrize("batching", ["padded", "grouped"])
def test_a_run_as_the_python_module_says_is_as_measured(batching: str, caplog: pytest.LogCaptureFixture) -> None:
    figures = TextFigures(
        batching=batching,
        num_texts=40,
        num_cut=0,
        counted=True,
        tokens_per_sequence=1134.0,
        padding_share=0.1,
        expected_peak_bytes=1,
        high_peak_bytes=1,
        out_of_memory_probability=0.0,
    )
    answer = exploration(candidate(2), lengths=LENGTHS, batching=batching, known={"texts": figures})
    scope: dict[str, Any] = {}
    exec(export("python", answer).text, scope)
    bexp, told = scope["bexp"], scope["RECOMMENDATION"]
    setup = bexp.RecommendedSetup.read(told)
    assert (setup.batching, setup.tokens_per_sequence) == (batching, 1134.0)
    callback, model = bexp.TrainerCallback(told), _Model()
    arguments = scope["training_arguments"](output_dir="out", use_cpu=True)
    state = SimpleNamespace(is_world_process_zero=True, global_step=0, max_steps=100, num_input_tokens_seen=0)
    with caplog.at_level(logging.INFO, "bexp"):
        callback.on_train_begin(arguments, state, None, model=model)
        mask = (torch.arange(3000) < torch.tensor([[512], [3000]])).long()
        model(input_ids=torch.ones(2, 3000, dtype=torch.long), attention_mask=mask)
        for _ in range(5):
            callback.on_step_begin(arguments, state, None)
            callback.on_step_end(arguments, state, None)
        callback.on_train_end(arguments, state, None)
    assert callback.report is not None
    assert "not as measured" not in caplog.text
    per_micro_batch = callback.report.tokens_per_second * callback.report.seconds / callback.report.steps
    assert per_micro_batch == pytest.approx(2 * 1134.0)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        return input_ids
