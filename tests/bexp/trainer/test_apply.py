from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import bexp
from bexp.allocator import current_allocator, set_allocator
from bexp.trainer.model_setup import applied_to
from bexp.trainer.recommended_setup import RecommendationError, _settings
from bexp.transformers.layers import decoder_layers
from bexp.transformers.recompute import is_checkpointing
from bexp.transformers.settings import SettingsError
from tests.bexp.trainer.recommendations import document, told_of_a_config, with_adapters
from tests.bexp.transformers import models


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")


def test_a_model_is_set_up_as_recommended_and_restored() -> None:
    model = models.tiny("olmoe")
    before = models.snapshot(model)
    batch = models.batch()
    wanted = models.step(model, batch)
    report = bexp.apply(model, document())
    settings = report.recommendation.settings
    assert settings == bexp.Settings(
        attention="sdpa:math", experts="bexp_fused", recompute="partial_50", bta_tile=2, loss="chunked"
    )
    assert models.snapshot(model) != before
    assert all(text in str(report) for text in ("bexp_fused", "tiles of 2", "partial_50", "micro_batch_size 4"))
    models.assert_same(models.step(model, batch), wanted)
    assert applied_to(model) is report
    assert bexp.restore(model)
    assert not bexp.restore(model)
    assert models.snapshot(model) == before


@pytest.mark.parametrize(
    ("name", "of_library", "setting"),
    [
        ("cublas_grouped", False, "bexp_cublas_grouped"),
        ("loop", False, "eager"),
        ("sonicmoe", False, "bexp_sonicmoe"),
        ("sonicmoe", True, "sonicmoe"),
        ("bexp_sonicmoe", True, "bexp_sonicmoe"),
        ("fused", True, "bexp_fused"),
    ],
)
def test_a_kernel_that_the_library_has_too_is_the_one_that_was_measured(
    name: str, of_library: bool, setting: str
) -> None:
    """The reference layers' `sonicmoe` is that of its package; transformers' loads another build of it."""
    candidate = {**document()["recommendation"]["candidate"], "expert_backend": name}
    request: dict[str, Any] = {"hf_config": {}} if of_library else {}
    assert _settings({}, candidate, request).experts == setting


def test_a_model_that_uses_hidden_states_between_layers_takes_no_groups() -> None:
    model = models.tiny("llama")
    first: Any = decoder_layers(model)[0]
    first.register_forward_hook(lambda _module, _inputs, output: output * 2)
    bexp.apply(model, bexp.RecommendedSetup(bexp.Settings(recompute="groups_2"), micro_batch_size=4))
    with pytest.raises(SettingsError, match="hidden states between its layers"):
        models.step(model, models.batch())


def test_a_second_recommendation_replaces_the_first() -> None:
    model = models.tiny("olmoe")
    before = models.snapshot(model)
    bexp.apply(model, document())
    bexp.apply(model, document(bta_tile=None, recompute="none"))
    bexp.restore(model)
    assert models.snapshot(model) == before


@pytest.mark.parametrize("recompute", ["partial_50", "groups_2", "experts"])
def test_a_copy_of_a_model_computes_with_its_own_weights(recompute: str) -> None:
    model, batch = models.tiny("olmoe"), models.batch()
    bexp.apply(model, document(recompute=recompute))
    copied = copy.deepcopy(model)
    plain = models.tiny("olmoe")
    with torch.no_grad():
        for parameter in [*copied.parameters(), *plain.parameters()]:
            parameter.mul_(1.5)
    models.assert_same(models.step(copied, batch), models.step(plain, batch))
    for refused in (lambda: bexp.restore(copied), lambda: bexp.apply(copied, document())):
        with pytest.raises(RecommendationError, match="copy the model before"):
            refused()
    assert bexp.restore(model)


@pytest.mark.parametrize("recompute", ["none", "selective", "experts"])
def test_checkpointing_that_was_enabled_before_gives_way_and_comes_back(recompute: str) -> None:
    model = models.tiny("olmoe")
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    report = bexp.apply(model, document(recompute=recompute))
    assert "checkpointing: switched off" in str(report)
    assert not is_checkpointing(model)
    bexp.restore(model)
    assert is_checkpointing(model)


def test_a_compiled_wrapper_is_set_up_inside_and_warned_of() -> None:
    model = models.tiny("olmoe")
    wrapper: Any = torch.compile(model, backend="eager")
    before = models.snapshot(model)
    report = bexp.apply(wrapper, document())
    assert any("then torch.compile" in warning for warning in report.warnings)
    assert applied_to(model) is report
    assert bexp.restore(wrapper)
    assert models.snapshot(model) == before


def test_a_recommendation_is_read_from_a_file_a_text_and_an_object(tmp_path: Path) -> None:
    path = tmp_path / "best.json"
    path.write_text(json.dumps(document()))
    found = [bexp.RecommendedSetup.read(source) for source in (path, str(path), json.dumps(document()), document())]
    assert all(recommendation == found[0] for recommendation in found)
    assert found[0].exploration_id == "exp-1"


def test_a_model_whose_own_code_was_measured_stays_as_it_is() -> None:
    told = document(attention_backend="own", expert_backend=None)
    settings = bexp.RecommendedSetup.read(told).settings
    assert (settings.attention, settings.loss) == (None, "library")
    model = models.tiny("olmoe")
    model.activation_checkpointing_enable()
    before = models.snapshot(model)
    assert "as your own code sets them" in str(bexp.apply(model, told))
    changed = {key for key, value in models.snapshot(model).items() if before.get(key, None) != value}
    assert changed == {"._bexp_applied"}
    assert bexp.restore(model)


def test_quantised_weights_are_a_warning() -> None:
    model = models.tiny("olmoe")
    model.is_quantized = True
    assert any("plain weights" in warning for warning in bexp.apply(model, document()).warnings)


def test_weights_of_other_bits_than_were_measured_are_refused() -> None:
    told = told_of_a_config({"lora": {"r": 8, "target_modules": "all-linear"}})
    told["job"]["request"]["quantization"] = "bnb_4bit"
    model = with_adapters(models.tiny("olmoe").to(torch.bfloat16))
    with pytest.raises(RecommendationError, match="with weights in 4 bits, and those of this model are plain"):
        bexp.apply(model, told)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.is_quantized = base.is_loaded_in_8bit = True
    with pytest.raises(RecommendationError, match="weights in 4 bits, and those of this model have 8 bits: load"):
        bexp.apply(model, told)
    base.is_loaded_in_8bit, base.is_loaded_in_4bit = False, True
    assert not any("bits" in warning for warning in bexp.apply(model, told).warnings)


@pytest.mark.parametrize(
    ("training", "weights", "master", "trainer"),
    [
        ({"precision": "pure"}, "bfloat16", False, None),
        ({"precision": "autocast"}, "float32", False, True),
        ({"precision": "master"}, "bfloat16", True, None),
        ({"precision": "pure", "lora": {"r": 8, "target_modules": "all-linear"}}, "bfloat16", False, True),
    ],
)
def test_the_trainer_gets_the_number_formats_that_were_measured(
    training: dict[str, Any], weights: str, master: bool, trainer: bool | None
) -> None:
    told = bexp.RecommendedSetup.read(told_of_a_config(training))
    assert (told.dtype, told.load_dtype, told.master_weights) == (weights, weights, master)
    assert bexp.training_arguments(told).get("bf16") is trainer
    model = models.tiny("olmoe").to(getattr(torch, weights))
    assert bexp.apply(with_adapters(model) if "lora" in training else model, told).warnings == ()


def test_wider_weights_than_were_measured_are_refused_and_narrower_ones_are_a_warning() -> None:
    pure, autocast = told_of_a_config({"precision": "pure"}), told_of_a_config({"precision": "autocast"})
    model = models.tiny("olmoe")
    before = models.snapshot(model)
    way = r"in bfloat16, .* in float32, which need more memory: .*dtype=torch.bfloat16, .*training.precision=autocast"
    with pytest.raises(RecommendationError, match=way):
        bexp.apply(model, pure)
    assert models.snapshot(model) == before
    model = model.to(torch.bfloat16)
    assert bexp.apply(model, pure).warnings == ()
    [warning] = bexp.apply(model, autocast).warnings
    assert "in float32, and those of this model are in bfloat16, which needs less memory" in warning


@pytest.mark.parametrize(
    ("dtype", "optimizer", "weights", "autocast"),
    [
        ("bfloat16", {}, "float32", "bfloat16"),
        ("bfloat16", {"master_dtype": None}, "bfloat16", None),
        ("float32", {}, "float32", None),
    ],
)
def test_a_trainer_keeps_float32_weights_where_the_reference_layers_had_master_weights(
    dtype: str, optimizer: dict[str, Any], weights: str, autocast: str | None
) -> None:
    told = document()
    told["job"]["request"]["training"]["optimizer"] = optimizer
    told["job"]["request"]["model"]["dtype"] = dtype
    setup = bexp.RecommendedSetup.read(told)
    assert (setup.dtype, setup.load_dtype, setup.autocast) == (dtype, weights, autocast)
    if weights == "bfloat16":
        with pytest.raises(RecommendationError, match=r"training\.optimizer\.master_dtype=float32"):
            bexp.apply(models.tiny("olmoe"), told)
    else:
        assert bexp.apply(models.tiny("olmoe"), told).warnings == ()


def test_an_answer_for_adapters_is_refused_for_a_full_model_and_the_reverse() -> None:
    lora = told_of_a_config({"precision": "autocast", "lora": {"r": 8, "target_modules": "all-linear"}})
    full = told_of_a_config({"precision": "autocast"})
    model = models.tiny("olmoe")
    total = sum(parameter.numel() for parameter in model.parameters())
    trains = rf"adapters of rank 8 .* has none and trains {total:,} of its {total:,} parameters: .*get_peft_model"
    with pytest.raises(RecommendationError, match=trains):
        bexp.apply(model, lora)
    adapted = with_adapters(model)
    with pytest.raises(RecommendationError, match=r"all weights trained, .* has adapters .* training\.lora"):
        bexp.apply(adapted, full)
    assert bexp.apply(adapted, lora).warnings == ()
    bexp.restore(adapted)
    for parameter in adapted.parameters():
        parameter.requires_grad_(True)
    assert bexp.apply(adapted, full).warnings == (), "all weights are trained"


def test_adapters_of_another_rank_are_a_warning() -> None:
    lora = told_of_a_config({"precision": "autocast", "lora": {"r": 4, "target_modules": "all-linear"}})
    [warning] = bexp.apply(with_adapters(models.tiny("olmoe")), lora).warnings
    assert "adapters of rank 4, and those of this model have [8]" in warning


def test_the_candidates_kernels_and_loss_may_be_ligers() -> None:
    settings = bexp.RecommendedSetup.read(document(kernels="liger", loss="liger")).settings
    assert (settings.kernels, settings.loss) == ("liger", "liger")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ({"recommendation": None}, "recommends nothing"),
        ({}, "no micro_batch_size"),
        ("{", "cannot read"),
        ("/no/such/file", "cannot read"),
        ("[1]", "cannot read"),
        (document(recompute="qkv"), "qkv"),
        (document(capacity_factor=1.25), "whose experts drop tokens"),
    ],
)
def test_what_is_no_recommendation_is_refused(source: object, reason: str) -> None:
    with pytest.raises(RecommendationError, match=reason):
        bexp.RecommendedSetup.read(source)  # type: ignore[arg-type]  # wrong on purpose


def test_another_architecture_is_refused() -> None:
    with pytest.raises(RecommendationError, match="num_layers is 3, not 2"):
        bexp.apply(models.tiny("olmoe", num_hidden_layers=3), document())
    with pytest.raises(RecommendationError, match=r"not a transformers model.*LightningModule"):
        bexp.apply(torch.nn.Linear(2, 2), document())


@pytest.mark.parametrize("of_the_command", [True, False])
def test_another_sequence_length_or_version_is_a_warning(of_the_command: bool) -> None:
    """A command writes the device into the report of the job; the service, and the Python export, beside the answer."""
    told, hardware = document(), {"hardware": {"device_name": "cpu", "versions": {"torch": "1.0"}}}
    if of_the_command:
        told["job"]["report"] = hardware
    else:
        told |= hardware
    report = bexp.apply(models.tiny("olmoe"), told, seq_length=7)
    assert any("sequences of 12 tokens, not 7" in text for text in report.warnings)
    assert any("torch 1.0" in text for text in report.warnings)
    with pytest.raises(RecommendationError, match="not 7"):
        bexp.apply(models.tiny("olmoe"), told, seq_length=7, strict=True)


def test_the_allocator_is_set_while_that_is_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    assert set_allocator("expandable_segments") is None
    assert os.environ["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64,expandable_segments:True"
    assert current_allocator() == "expandable_segments"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    told = set_allocator("default")
    assert told is not None
    assert "PYTORCH_ALLOC_CONF=expandable_segments:False" in told
    assert current_allocator() == "expandable_segments"


def test_the_candidate_that_divides_the_batch_is_used_where_there_is_one() -> None:
    told = document(micro_batch_size=6, recompute="full")
    own = told["recommendation"]["candidate"]
    assert bexp.RecommendedSetup.read(told).micro_batch_size == 6, "there is no other"
    dividing = {"role": "dividing", "candidate": own, "tokens_per_second": 1.0}
    told["recommendation"]["alternatives"] = [{"role": "stock"}, dividing]
    assert bexp.RecommendedSetup.read(told).tokens_per_second == 1000.0, "it is the recommended one itself"
    told["recommendation"]["whole_model"] = {"tokens_per_second": 990.0, "measurement": {"peak_bytes": 7}}
    dividing |= {"candidate": own | {"micro_batch_size": 8, "recompute": "none"}, "tokens_per_second": 950.0}
    dividing |= {"confidence": 80, "measured_peak_bytes": 9, "whole_model": None}
    found = bexp.RecommendedSetup.read(told)
    assert (found.micro_batch_size, found.settings.recompute, found.settings.attention) == (8, "none", "sdpa:math")
    assert (found.tokens_per_second, found.confidence, found.peak_bytes) == (950.0, 80, 9)
    fields = bexp.training_arguments(told, world_size=1)
    assert (fields["per_device_train_batch_size"], fields["gradient_accumulation_steps"]) == (8, 2)
