"""What a trial sets in TrainingArguments, what it refuses, and what an evaluation needs on the device."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from bexp.tune import hf_trainer
from bexp.tune.clock import ACCUMULATION
from bexp.tune.hf_trainer import _num_steps, _prepare, _refuse_model_init, describe_evaluation, evaluate_longest
from bexp.tune.link import CHOICE, SCRATCH, SIZE, CannotSetError
from bexp.tune.ranks import Ranks


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainingArguments:
    monkeypatch.setenv(SCRATCH, str(tmp_path))
    return TrainingArguments(str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=8)


@pytest.mark.parametrize("field", ["hf_deepspeed_config", "deepspeed_plugin", "steps_per_generation"])
def test_what_computes_with_its_sizes_has_them_in_the_command_and_keeps_them(
    field: str, arguments: TrainingArguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    vars(arguments)[field] = object()  # as DeepSpeed's configuration and TRL's GRPOConfig have it
    with pytest.raises(CannotSetError, match=r"put {micro_batch_size} and {grad_accum_steps} where"):
        _prepare(arguments)
    monkeypatch.setenv(SIZE, "4")
    _prepare(arguments)
    assert arguments.gradient_accumulation_steps == 8, "its configuration says so"


def test_two_accumulation_steps_are_enough_for_timing(arguments: TrainingArguments) -> None:
    _prepare(arguments)
    assert arguments.gradient_accumulation_steps == ACCUMULATION
    assert vars(arguments)["bexp_asked"] == (4, 8)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ('{"wrong": true}', "TrainingArguments have no 'wrong': put {wrong} where the command"),
        ('{"gradient_checkpointing": "off"}', "'gradient_checkpointing' is true or false, and not 'off'"),
    ],
)
def test_a_field_that_there_is_not_or_of_another_kind_is_refused(
    choice: str, said: str, arguments: TrainingArguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CHOICE, choice)
    with pytest.raises(CannotSetError, match=f"^{said}"):
        _prepare(arguments)


def test_a_model_that_is_made_anew_for_the_training_cannot_be_set_up() -> None:
    with pytest.raises(CannotSetError, match="model_init makes another one"):
        _refuse_model_init(SimpleNamespace(model_init=object))
    _refuse_model_init(SimpleNamespace(model_init=None))


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
    monkeypatch.setattr(hf_trainer, "peak_bytes", lambda _: (1000, None))
    monkeypatch.setattr(hf_trainer, "reset_peak", lambda _: None)
    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=VOCABULARY, use_cache=False))
    texts = [{"input_ids": torch.arange(LENGTH), "labels": torch.arange(LENGTH)} for _ in range(TEXTS)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_eval_batch_size=4, use_cpu=True, report_to=[], **fields
    )
    trainer = Trainer(model=model, args=arguments, eval_dataset=texts, compute_metrics=no_metrics)
    one = 4 * LENGTH * (VOCABULARY * 4 + 8)
    figures = evaluate_longest(trainer)
    assert (figures["peak_bytes"], figures["kept_bytes"]) == (1000 + copies * one, copies * one)
    assert figures["kept_rows"] == (TEXTS if copies else 0)


def test_of_several_datasets_that_of_the_longest_texts_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    monkeypatch.setattr(hf_trainer, "peak_bytes", lambda _: (ran[-1], None))
    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=VOCABULARY, use_cache=False))
    model.register_forward_pre_hook(lambda _, __, given: ran.append(given["input_ids"].shape[1]), with_kwargs=True)
    texts = {
        name: [{"input_ids": torch.arange(length), "labels": torch.arange(length)}] * 2
        for name, length in (("short", 8), ("long", 32), ("middle", 16))
    }
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    trainer = Trainer(model=model, args=arguments, eval_dataset={**texts, "stream": iter(())})
    assert (describe_evaluation(trainer) or {})["length"] == 32
    assert evaluate_longest(trainer)["peak_bytes"] == 32
    assert ran == [8, 32, 16]


@pytest.mark.parametrize(
    ("most_bytes", "found"),
    [
        (10_000, {"peak_bytes": 8000, "kept_bytes": 6000}),
        (7000, {"peak_bytes": 8000, "kept_bytes": 6000, "fitting_steps": 1 + 5000 // 300}),
        (1500, {"peak_bytes": 8000, "kept_bytes": 6000, "fitting_size": 4, "fitting_peak_bytes": 1000}),
        (500, {"peak_bytes": 8000, "kept_bytes": 6000, "fitting_size": 2, "fitting_peak_bytes": 500}),
        (100, {"peak_bytes": 8000, "kept_bytes": 6000, "fitting_steps": 1}),
    ],
)
def test_a_size_or_a_number_of_steps_that_fits_is_tried(
    monkeypatch: pytest.MonkeyPatch, most_bytes: int, found: dict[str, int]
) -> None:
    arguments = SimpleNamespace(per_device_eval_batch_size=8, device="cuda:0")

    def evaluate(trainer: Any) -> dict[str, float]:
        own = trainer.args.per_device_eval_batch_size * 250
        return {"peak_bytes": own + 6000, "kept_bytes": 6000, "batch_bytes": 300}

    monkeypatch.setattr(hf_trainer, "evaluate_longest", evaluate)
    trainer = SimpleNamespace(args=arguments)
    assert hf_trainer._evaluate(trainer, Ranks(), most_bytes) == found
    assert arguments.per_device_eval_batch_size == 8


def test_an_evaluation_without_memory_is_tried_at_smaller_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = SimpleNamespace(per_device_eval_batch_size=8, device="cpu")

    def evaluate(trainer: Any) -> dict[str, float]:
        if trainer.args.per_device_eval_batch_size > 2:
            raise torch.OutOfMemoryError("does not fit")
        return {"peak_bytes": 900, "kept_bytes": 0, "batch_bytes": 0}

    monkeypatch.setattr(hf_trainer, "evaluate_longest", evaluate)
    found = hf_trainer._evaluate(SimpleNamespace(args=arguments), Ranks(), 1000)
    assert found == {"peak_bytes": None, "fitting_size": 2, "fitting_peak_bytes": 900}
    monkeypatch.setattr(hf_trainer, "evaluate_longest", lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        hf_trainer._evaluate(SimpleNamespace(args=arguments), Ranks(), 1000)


@pytest.mark.parametrize(
    ("max_steps", "epochs", "data", "steps"),
    [(50, 3.0, range(100), 50), (-1, 3.0, range(100), 39), (-1, 0.5, range(100), 7), (-1, 3.0, iter(()), None)],
)
def test_the_steps_of_the_commands_own_run_are_known_if_its_end_is(
    max_steps: int, epochs: float, data: object, steps: int | None
) -> None:
    arguments = SimpleNamespace(max_steps=max_steps, num_train_epochs=epochs)
    trainer = SimpleNamespace(args=arguments, train_dataset=data)
    assert _num_steps(trainer, 4, 2) == steps
