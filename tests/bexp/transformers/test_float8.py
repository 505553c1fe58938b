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


def test_sizes_that_float8_cannot_have_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torchao.install(monkeypatch)
    model = models.tiny("llama", intermediate_size=40)
    set_up(model, Settings(float8="tensorwise"))
    assert not [name for name in converted(model) if "mlp" in name]
    with pytest.raises(SettingsError, match="GPT2LMHeadModel has no linear layers that float8 could compute"):
        set_up(models.tiny("gpt2"), Settings(float8="tensorwise"))
    with pytest.raises(SettingsError, match="'tensorwise' or 'rowwise', not 'blockwise'"):
        Settings(float8="blockwise")  # type: ignore[arg-type]  # what the user may write


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError(f"No module named '{name}'")

    monkeypatch.setattr("bexp.transformers.float8.import_module", fail)
    with pytest.raises(SettingsError, match=r"float8 needs torchao: pip install 'bexp\[torchao\]'"):
        set_up(models.tiny("llama"), Settings(float8="tensorwise"))


def test_apply_converts_a_persons_model(monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = fake_torchao.install(monkeypatch)
    model = models.tiny("olmoe").bfloat16()
    told = told_of_a_config({"precision": "float8_tensorwise"}, expert_backend="grouped_mm")
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
