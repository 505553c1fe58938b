"""liger's kernels, replaced by a package that patches models as liger does."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from bexp.transformers.layers import decoder_layers
from bexp.transformers.set_up import set_up
from bexp.transformers.settings import Settings, SettingsError
from tests.bexp.transformers import fake_liger, models

LIGER = Settings(kernels="liger")


def source_of(model: Any) -> dict[str, Any]:
    """The names in the library's module of a model's class."""
    return {name: id(value) for name, value in vars(sys.modules[type(model).__module__]).items()}


@pytest.mark.parametrize(
    ("model_type", "settings", "expected"),
    [
        ("llama", LIGER, {"norm": 4, "gated": 2, "rotation": 2}),
        ("llama", Settings(kernels="liger", recompute="full", loss="chunked"), {"norm": 8, "gated": 4, "rotation": 4}),
        ("llama", Settings(kernels="liger", loss="liger"), {"norm": 4, "gated": 2, "rotation": 2, "loss": 1}),
        ("llama", Settings(kernels="liger", bta_tile=2), {"norm": 4, "gated": 2, "rotation": 8}),
        ("qwen3_moe", Settings(kernels="liger", experts="batched_mm"), {"norm": 4, "rotation": 2}),
    ],
)
def test_the_layers_run_with_ligers_kernels_until_they_are_restored(
    monkeypatch: pytest.MonkeyPatch, model_type: str, settings: Settings, expected: dict[str, int]
) -> None:
    calls = fake_liger.install(monkeypatch)
    model, inputs = models.tiny(model_type), models.batch()
    wanted, before, names = models.step(model, inputs), models.snapshot(model), source_of(model)
    applied = set_up(model, settings)
    changed = {name for name, value in source_of(model).items() if names.get(name) != value}
    assert changed == {"apply_rotary_pos_emb"}  # no class: other models are built as the library builds them
    models.assert_same(models.step(model, inputs), wanted)
    assert calls == expected
    applied.undo()
    assert (models.snapshot(model), source_of(model)) == (before, names)
    models.assert_same(models.step(model, inputs), wanted)
    assert calls == expected


def test_a_layer_alone_is_changed_as_in_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_liger.install(monkeypatch)
    model = models.tiny("llama")
    layer = decoder_layers(model)[1]
    applied = set_up(layer, LIGER)
    model(**models.batch())
    assert calls == {"norm": 2, "gated": 1, "rotation": 2}
    applied.undo()
    assert "forward" not in vars(layer.get_submodule("mlp"))


def test_a_sharded_layer_of_another_class_leaves_the_library_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """fully_shard makes a subclass in a module of torch."""
    fake_liger.install(monkeypatch)
    model = models.tiny("llama")
    names = source_of(model)
    for layer in decoder_layers(model):
        layer.__class__ = type("Sharded", (type(layer),), {"__module__": torch.nn.functional.__name__})
    applied = set_up(model, LIGER)
    changed = {name for name, value in source_of(model).items() if names.get(name) != value}
    assert changed == {"apply_rotary_pos_emb"}
    applied.undo()
    assert source_of(model) == names


def test_a_package_that_fails_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_liger.install(monkeypatch, fails=True)
    model = models.tiny("llama")
    before, names = models.snapshot(model), source_of(model)
    with pytest.raises(SettingsError, match=r"liger-kernel fails on LlamaDecoderLayer: .*no attribute 'q_norm'"):
        set_up(model, Settings(kernels="liger", recompute="full"))
    assert (models.snapshot(model), source_of(model)) == (before, names)


def test_a_model_without_ligers_kernels_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_liger.install(monkeypatch)
    with pytest.raises(SettingsError, match="liger-kernel does not know the model type 'gpt2'"):
        set_up(models.tiny("gpt2"), LIGER)
    capped = models.tiny("gemma2")
    set_up(capped, Settings(loss="liger"))
    with pytest.raises(SettingsError, match="this loss takes logits as the head makes them"):
        models.step(capped, models.batch())
    with pytest.raises(SettingsError, match="Linear has no decoder layers"):
        set_up(torch.nn.Linear(2, 2), LIGER)
    for name in ("monkey_patch", "functional"):
        monkeypatch.setitem(sys.modules, f"liger_kernel.transformers.{name}", None)
    for settings in (LIGER, Settings(loss="liger")):
        with pytest.raises(SettingsError, match="need liger-kernel: pip install liger-kernel"):
            set_up(models.tiny("llama"), settings)
