"""The module for Lightning, run on layers and with a stand-in of the library."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.dimensions.recompute import Recompute, recomputed_layers
from bexp.explorer.exports.exploration import ExportSource
from bexp.explorer.exports.export import export
from bexp.explorer.trainers.document import ExportError
from bexp.transformers.recompute import chosen_layers
from bexp.transformers.settings import Settings
from tests.explorer.exports.samples import SHAPES, SHARDED, candidate, exploration, header_of


def module_of(answer: ExportSource, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the module defines. Its trainers and strategies are their arguments."""
    strategies = SimpleNamespace(FSDPStrategy=lambda **told: told)
    for name, fake in (("", SimpleNamespace(Trainer=lambda **told: told)), (".pytorch.strategies", strategies)):
        monkeypatch.setitem(sys.modules, f"lightning{name}", fake)
    scope: dict[str, Any] = {}
    exec(export("lightning", answer).text, scope)
    return scope


def recomputed_by(answer: ExportSource, num_layers: int, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(num_layers))
    before = list(layers)
    module_of(answer, monkeypatch)["recompute"](layers)
    return {index for index, (old, new) in enumerate(zip(before, layers, strict=True)) if old is not new}


@pytest.mark.parametrize("policy", ["partial_25", "partial_50", "partial_75", "layers_3", "full"])
def test_the_layers_that_were_measured_are_recomputed(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    best = candidate(recompute=Recompute(policy))
    measured = chosen_layers(Settings(recompute=policy), 16)
    assert recomputed_by(exploration(best), 16, monkeypatch) == measured
    moe = {"num_experts": 8, "top_k": 2, "expert_ffn_hidden_size": 64, "first_k_dense": 3}
    shapes = exploration(best, hf_config=None, hf_seq_length=None, model={**SHAPES, "moe": moe})
    assert shapes.request is not None
    assert shapes.request.model is not None
    chosen = recomputed_layers(shapes.request.model, best.recompute)
    expected = {index for index, is_recomputed in enumerate(chosen) if is_recomputed}
    assert recomputed_by(replace(shapes, report=None), 10, monkeypatch) == expected


@pytest.mark.parametrize(("num_devices", "splits"), [(1, True), (4, False)])
def test_compiled_layers_of_replicas_are_not_split_by_buckets(
    num_devices: int, splits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.Module, "compile", lambda layer: None)
    answer = exploration(candidate(execution=Execution.COMPILE), num_devices=num_devices)
    with torch._dynamo.config.patch(optimize_ddp=True):
        module_of(answer, monkeypatch)["compile_layers"](nn.ModuleList([nn.Linear(1, 1)]))
        assert torch._dynamo.config.optimize_ddp is splits


def test_devices_may_be_those_of_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    make = module_of(exploration(num_devices=16), monkeypatch)["make_trainer"]
    for told in ({}, {"num_nodes": 2, "devices": 8}):
        trainer = make(**told, max_epochs=3)
        assert {"devices": 16, "num_nodes": 1, "max_epochs": 3, **told}.items() <= trainer.items()
    for told in ({"num_nodes": 2}, {"devices": 8}):
        with pytest.raises(ValueError, match=r"are not the 16 that this file is for"):
            make(**told)


def test_a_sharded_model_is_cut_into_its_decoder_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one unit, all parameters would be whole at a time, which was not measured."""
    make = module_of(exploration(**SHARDED), monkeypatch)["make_trainer"]
    strategy = make(nn.Linear, logger=False)["strategy"]
    assert strategy == {"sharding_strategy": "FULL_SHARD", "auto_wrap_policy": {nn.Linear}}
    with pytest.raises(TypeError, match="layer_class"):
        make(logger=False)


def test_adapters_of_a_sharded_model_are_refused() -> None:
    """FSDP joins the parameters of a layer into one tensor, and adapters have another number format."""
    lora = {"lora": {"r": 8, "target_modules": ["q_proj"]}}
    answer = exploration(num_devices=8, training={"sharding": "zero3", **lora})
    with pytest.raises(ExportError, match="Lightning cannot express LoRA with the sharding level 'zero3'"):
        export("lightning", answer)
    assert "peft.LoraConfig" in export("transformers", answer).text + header_of("transformers", answer)
    assert "peft.LoraConfig" in export("lightning", exploration(num_devices=8, training=lora)).text
    with pytest.raises(ValidationError, match="Lightning cannot express LoRA with the sharding level 'zero3'; these"):
        exploration(num_devices=8, training={"sharding": "zero3", **lora}, trainer="lightning")
