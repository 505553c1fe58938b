from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

import bexp
from bexp.explorer.model.optimizers import LIBRARY
from bexp.step.results import StepRecommendation
from bexp.trainer.recommended_setup import RecommendationError
from tests.bexp.trainer.recommendations import document, told_of_a_config

PURE, AUTOCAST = {"precision": "pure"}, {"precision": "autocast"}


@pytest.fixture
def sft_config(monkeypatch: pytest.MonkeyPatch) -> Any:
    """TRL's configuration, or one with its defaults where it is not installed."""
    if find_spec("trl"):
        return import_module("trl").SFTConfig
    from transformers import TrainingArguments

    class SFTConfig(TrainingArguments):
        def __init__(self, *, gradient_checkpointing: bool = True, bf16: bool | None = None, **fields: Any) -> None:
            bf16 = not fields.get("fp16") if bf16 is None else bf16
            super().__init__(**fields, gradient_checkpointing=gradient_checkpointing, bf16=bf16)

    monkeypatch.setitem(sys.modules, "trl", SimpleNamespace(SFTConfig=SFTConfig))
    return SFTConfig


def test_training_arguments_keep_the_effective_batch() -> None:
    fields = bexp.training_arguments(document(recompute="full"), world_size=2)
    assert fields == {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": False},
        "torch_compile": False,
        "optim": "adamw_torch_fused",
        "bf16": True,
    }
    assert bexp.training_arguments(document())["activation_checkpointing"] is False
    with pytest.raises(RecommendationError, match="does not divide"):
        bexp.training_arguments(document(micro_batch_size=3))


def test_an_optimizer_on_the_host_is_given_to_the_trainer_and_clips_nothing(caplog: pytest.LogCaptureFixture) -> None:
    fields = bexp.training_arguments(told_of_a_config({"optimizer": {"name": "adamw_cpu_offload"}}))
    assert "optim" not in fields
    assert fields["max_grad_norm"] == 0.0
    assert "optimizer_cls_and_kwargs=(torchao.optim.CPUOffloadOptimizer" in caplog.text
    caplog.clear()
    bexp.training_arguments(told_of_a_config({"optimizer": {"name": "adamw_cpu_offload"}}), max_grad_norm=1.0)
    assert "gradients are clipped at 1.0, which the measured optimizer never sees" in caplog.text


def test_muon_is_given_to_the_trainer_which_has_no_name_for_it(caplog: pytest.LogCaptureFixture) -> None:
    fields = bexp.training_arguments(told_of_a_config({"optimizer": {"name": "muon"}}))
    assert fields.keys().isdisjoint({"optim", "optim_args", "max_grad_norm"})
    assert [record.message.partition(": ")[2] for record in caplog.records] == [LIBRARY["muon"].note]


def test_accumulation_is_left_to_the_trainer_where_no_batch_was_stated() -> None:
    told = document()
    told["job"]["request"]["batch_size"] = None
    assert bexp.RecommendedSetup.read(told).grad_accum_steps(2) == 1
    assert "gradient_accumulation_steps" not in bexp.training_arguments(told, world_size=2)


def test_the_optimizer_is_the_measured_one() -> None:
    told = told_of_a_config({"optimizer": {"name": "sgd"}})
    fields = bexp.training_arguments(told)
    assert (fields["optim"], fields["optim_args"]) == ("sgd", "momentum=0.9")
    assert bexp.training_arguments(told, optim_args="momentum=0.5")["optim_args"] == "momentum=0.5"
    assert "optim_args" not in bexp.training_arguments(told, optim="adafactor")


def test_texts_are_grouped_by_length_where_that_was_measured(caplog: pytest.LogCaptureFixture) -> None:
    from transformers import TrainingArguments

    told = told_of_a_config(PURE)
    told["job"]["request"] |= {"lengths": {"histogram": [[12, 3], [6, 1]]}, "batching": "grouped"}
    made = TrainingArguments(**bexp.training_arguments(told, output_dir="out", use_cpu=True))
    assert (made.train_sampling_strategy, caplog.text) == ("group_by_length", "")
    own = bexp.training_arguments(told, train_sampling_strategy="random")
    assert own["train_sampling_strategy"] == "random"
    assert "texts in the order 'random', and grouped ones were measured" in caplog.text
    told["job"]["request"]["batching"] = "padded"
    assert "train_sampling_strategy" not in bexp.training_arguments(told)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("training", "bf16"), [(PURE, False), (AUTOCAST, True)])
@pytest.mark.parametrize(("recompute", "checkpointing"), [("none", False), ("partial_50", False), ("full", True)])
def test_trls_defaults_give_way(
    sft_config: Any, training: dict[str, Any], bf16: bool, recompute: str, checkpointing: bool
) -> None:
    fields = bexp.training_arguments(told_of_a_config(training, recompute=recompute), output_dir="out", use_cpu=True)
    made = sft_config(**fields)
    assert (made.bf16, made.activation_checkpointing, made.gradient_checkpointing) == (
        bf16,
        checkpointing,
        checkpointing,
    )
    assert (made.per_device_train_batch_size, made.gradient_accumulation_steps) == (4, 4)


@dataclass
class _SFTConfig:
    per_device_train_batch_size: int = 8
    packing: bool = False
    packing_strategy: str = "bfd"
    loss_type: str = "chunked_nll"


def test_sft_is_told_how_texts_are_laid_out_and_to_leave_the_loss_to_the_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = told_of_a_config(PURE)
    whole = bexp.training_arguments(told, config_class=_SFTConfig)
    assert {"packing": False, "padding_free": False, "loss_type": "nll"}.items() <= whole.items()
    told["job"]["request"] |= {"lengths": {"histogram": [[12, 3], [6, 1]]}, "batching": "packed"}
    packed = bexp.training_arguments(told, config_class=_SFTConfig)
    assert {"packing": True, "padding_free": True, "packing_strategy": "bfd"}.items() <= packed.items()
    assert not {"packing", "loss_type"} & bexp.training_arguments(told).keys(), "TrainingArguments has neither"
    assert caplog.text == ""
    own = bexp.training_arguments(told, config_class=_SFTConfig, packing=False)
    assert "padding_free" not in own
    assert "texts that are padded, not packed documents" in caplog.text


@pytest.mark.parametrize("is_fused", [True, False])
def test_a_loss_that_trl_computes_itself_is_warned_of(
    is_fused: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    utils = SimpleNamespace(**{"add_fused_lm_head": print} if is_fused else {})
    monkeypatch.setitem(sys.modules, "trl", SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "trl.trainer", SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "trl.trainer.utils", utils)
    bexp.training_arguments(told_of_a_config(PURE), config_class=_SFTConfig)
    assert ("holds no logits: the measured loss is not used" in caplog.text) is is_fused


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("training", [PURE, AUTOCAST])
@pytest.mark.parametrize("name", ["activation_checkpointing", "gradient_checkpointing"])
def test_a_persons_own_fields_win_and_what_they_contradict_is_said(
    training: dict[str, Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import TrainingArguments

    told = told_of_a_config(training, recompute="none")
    with caplog.at_level(logging.WARNING, "bexp"):
        assert bexp.training_arguments(told, output_dir="out")["output_dir"] == "out"
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING, "bexp"):
        own: dict[str, Any] = {
            "bf16": True,
            name: True,
            "optim": "adafactor",
            "per_device_train_batch_size": 8,
            "max_length": 6,
        }
        fields = bexp.training_arguments(told, output_dir="out", use_cpu=True, **own)
    assert (fields.pop("max_length"), fields["gradient_accumulation_steps"]) == (6, 2)
    made = TrainingArguments(**fields)
    assert (made.bf16, made.activation_checkpointing, made.optim) == (True, True, "adafactor")
    found = [record.getMessage().partition(": ")[2] for record in caplog.records]
    assert found == [
        "micro_batch_size 8, not the recommended 4",
        "sequences of up to 6 tokens, not 12",
        *(
            ["products are computed under autocast of bfloat16, and were measured without autocast"]
            * (training == PURE)
        ),
        "optimizer adafactor, not adamw_torch_fused",
        "gradient checkpointing, where recomputation 'none' was measured",
    ]


def test_one_format_of_autocast_takes_the_place_of_the_other(caplog: pytest.LogCaptureFixture) -> None:
    fields = bexp.training_arguments(told_of_a_config(AUTOCAST), fp16=True)
    assert (fields["fp16"], "bf16" in fields) == (True, False)
    assert "under autocast of float16, and were measured under autocast of bfloat16" in caplog.text


def test_another_batch_is_said(caplog: pytest.LogCaptureFixture) -> None:
    fields = bexp.training_arguments(document(), world_size=2, gradient_accumulation_steps=5)
    assert fields["gradient_accumulation_steps"] == 5
    assert "a batch of 40 sequences, not 16" in caplog.text
    with pytest.raises(RecommendationError, match="micro_batch_size 3 on 2 devices does not divide"):
        bexp.training_arguments(document(), world_size=2, per_device_train_batch_size=3)


def test_a_step_of_a_persons_own_code_decides_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", SimpleNamespace())
    measured = StepRecommendation(8, 2, 1.0, 97, 0.0, (), effective_batch_size=16)
    expected = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    for told in (measured, measured.to_json(), document(attention_backend="own")):
        found = bexp.training_arguments(told)
        assert found.keys() == expected.keys()
    assert bexp.training_arguments(measured) == expected
