"""Linear layers in float8: which are converted, and that the model is as before afterwards."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

import bexp
from bexp.transformers.set_up import set_up
from bexp.transformers.settings import Settings, SettingsError
from tests.bexp.trainer.recommendations import told_of_a_config
from tests.bexp.transformers import fake_torchao, models

pytest.importorskip("transformers")


def converted(model: Any) -> list[str]:
    return [name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"]


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("llama", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("qwen3_moe", {"q_proj", "k_proj", "v_proj", "o_proj"}),
    ],
)
def test_linear_layers_of_decoder_layers_are_converted_and_restored(
    monkeypatch: pytest.MonkeyPatch, model_type: str, names: set[str]
) -> None:
    recipes = fake_torchao.install(monkeypatch)
    model, inputs = models.tiny(model_type, intermediate_size=48), models.batch()
    wanted, before = models.step(model, inputs), models.snapshot(model)
    parameters = dict(model.named_parameters())
    applied = set_up(model, Settings(float8="rowwise"))
    assert recipes == ["rowwise"]
    found = converted(model)
    assert {name.rsplit(".", 1)[-1] for name in found} == names
    assert len(found) == len(names) * model.config.num_hidden_layers
    assert all(name.startswith("model.layers.") for name in found), "the head is outside the layers"
    now = dict(model.named_parameters())
    assert now.keys() == parameters.keys()
    assert all(now[name] is parameter for name, parameter in parameters.items())
    loss = models.step(model, inputs).loss
    assert 0 < abs(float(loss - wanted.loss)) < 0.05 * float(wanted.loss)
    applied.undo()
    assert models.snapshot(model) == before
    models.assert_same(models.step(model, inputs), wanted, tolerance=0.0)


def test_sizes_that_float8_cannot_have_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torchao.install(monkeypatch)
    model = models.tiny("llama", intermediate_size=40)
    set_up(model, Settings(float8="tensorwise"))
    assert not [name for name in converted(model) if "mlp" in name]
    with pytest.raises(SettingsError, match="GPT2LMHeadModel has no linear layers that float8 could compute"):
        set_up(models.tiny("gpt2"), Settings(float8="tensorwise"))
    with pytest.raises(SettingsError, match="'tensorwise' or 'rowwise', not 'blockwise'"):
        Settings.from_json({"float8": "blockwise"})


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError(f"No module named '{name}'")

    monkeypatch.setattr("bexp.transformers.float8.import_module", fail)
    with pytest.raises(SettingsError, match=r"float8 needs torchao: pip install 'bexp\[torchao\]'"):
        set_up(models.tiny("llama"), Settings(float8="tensorwise"))


def test_apply_converts_a_persons_model(monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = fake_torchao.install(monkeypatch)
    model = models.tiny("olmoe").bfloat16()
    told = told_of_a_config({"precision": "float8_tensorwise"})
    told["recommendation"]["candidate"] |= {"expert_backend": "grouped_mm"}
    report = bexp.apply(model, told)
    assert recipes == ["tensorwise"]
    assert converted(model)
    assert "linear layers of decoder layers: float8 (tensorwise)" in str(report)
    assert bexp.restore(model)
    assert not converted(model)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_torchaos_own_layers_are_near_the_models(recipe: Any) -> None:
    model, inputs = models.tiny("llama", intermediate_size=48).bfloat16(), models.batch(length=16)
    wanted = models.step(model, inputs).loss
    applied = set_up(model, Settings(float8=recipe))
    assert len(converted(model)) == 7 * model.config.num_hidden_layers
    assert float(models.step(model, inputs).loss) == pytest.approx(float(wanted), rel=0.05)
    applied.undo()
    assert not converted(model)
