"""What a trial sets in TrainingArguments, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import TrainingArguments

from bexp.tune.hf_trainer import _prepare, _refuse_model_init
from bexp.tune.link import CHOICE, SCRATCH, SIZE, CannotSetError
from bexp.tune.measuring import ACCUMULATION


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainingArguments:
    monkeypatch.setenv(SCRATCH, str(tmp_path))
    return TrainingArguments(str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=8)


@pytest.mark.parametrize("field", ["hf_deepspeed_config", "steps_per_generation"])
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
