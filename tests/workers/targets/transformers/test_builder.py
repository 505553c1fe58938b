from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bexp.explorer.cost.text_batches import TextBatch
from bexp.workers.targets.transformers.model import BuildSettings, build_model
from bexp.workers.targets.transformers.resolved import ResolvedModel, resolve
from bexp.workers.targets.transformers.target import describe_parts

pytest.importorskip("transformers")

CPU = torch.device("cpu")
SLIDING = {
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 160,
    "sliding_window": 8,
}


@pytest.fixture(scope="module")
def resolved() -> ResolvedModel:
    return resolve(SLIDING, 24)


def test_layers_that_differ_by_their_mask_alone_are_different_kinds(resolved: ResolvedModel) -> None:
    sliding, full = "Gemma3DecoderLayer[sliding_attention]", "Gemma3DecoderLayer[full_attention]"
    assert resolved.kinds == (sliding, sliding, full)
    builder = resolved.builder(CPU)
    mask = builder.layer(sliding, 2).kwargs["attention_mask"]
    assert mask.sum() < 2 * 24 * 25 / 2  # the window hides what a causal mask shows


def test_parts_hold_every_parameter_of_the_model_once(resolved: ResolvedModel) -> None:
    parts = describe_parts(resolved, tiles=None, checkpointing=None, named={})
    inside = sum(parts.layers.count(kind.name) * kind.num_parameters for kind in parts.kinds)
    whole = build_model(resolved.config, resolved.settings, CPU)
    assert inside + parts.shell.num_parameters == parts.num_parameters == sum(p.numel() for p in whole.parameters())
    assert resolved.check.by_parts


@pytest.mark.parametrize(("precision", "dtype"), [("pure", torch.bfloat16), ("autocast", torch.float32)])
def test_a_layer_and_the_shell_run_forward_and_backward(
    resolved: ResolvedModel, precision: str, dtype: torch.dtype
) -> None:
    settings = BuildSettings(precision="pure" if precision == "pure" else "autocast")
    builder = resolved.builder(CPU, settings)
    texts = TextBatch(((24,), (12,), (20,)), 24)
    part = builder.layer(resolved.kinds[0], texts)
    part.backward(part.forward())
    assert part.hidden.shape == (3, 24, 64)
    assert part.hidden.grad is not None
    assert all(p.dtype == dtype and p.grad is not None and p.grad.isfinite().all() for p in part.module.parameters())
    part.clear_gradients()
    assert part.hidden.grad is None
    shell = builder.shell(texts)
    loss = shell.forward()
    loss.backward()
    assert loss.isfinite()
    assert shell.model.get_input_embeddings().weight.grad is not None


def test_preparation_reaches_every_model_that_is_built() -> None:
    def freeze(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("self_attn" in name)

    resolved = resolve(SLIDING, 24, settings=BuildSettings(prepare=freeze))
    assert 0 < resolved.layer_parts[0].trainable_bytes < resolved.layer_parts[0].parameter_bytes
    part = resolved.builder(CPU).layer(resolved.kinds[0], 1)
    part.backward(part.forward())
    assert {name.split(".")[0] for name, p in part.module.named_parameters() if p.grad is not None} == {"self_attn"}


def test_no_values_are_drawn_for_layers_that_are_never_run(monkeypatch: pytest.MonkeyPatch) -> None:
    initialization = import_module("transformers.initialization")
    drawn: list[torch.device] = []
    draw: Callable[..., Tensor] = initialization.normal_

    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        drawn.append(tensor.device)
        return draw(tensor, *args, **kwargs)

    monkeypatch.setattr(initialization, "normal_", noted)
    layer = resolve(SLIDING, 24).builder(CPU).layer("Gemma3DecoderLayer[full_attention]", 1)
    assert set(drawn) == {CPU}
    assert all(parameter.std() > 0 for name, parameter in layer.module.named_parameters() if "proj" in name)


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash_attn is installed")
def test_an_attention_package_that_is_missing_is_left_out_with_the_reason(resolved: ResolvedModel) -> None:
    found = resolved.attention_implementations
    assert found["sdpa"] is None
    assert "flash" in (found["flash_attention_2"] or "").lower()


def test_an_unknown_kind_is_a_key_error(resolved: ResolvedModel) -> None:
    with pytest.raises(KeyError):
        resolved.builder(CPU).layer("NoSuchLayer", 1)
