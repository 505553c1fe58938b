"""Muon for matrices of hidden layers, with AdamW for everything else."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bexp
from bexp.trainer.muon_optimizer import MuonWithAdamW, outer_modules

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}


def mixtral(**fields: Any) -> Any:
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**SIZES, "num_local_experts": 4, **fields}))


def groups_by_name(model: nn.Module, optimizer: MuonWithAdamW) -> list[set[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [{names[id(parameter)] for parameter in group["params"]} for group in optimizer.param_groups]


@pytest.mark.parametrize("tied", [False, True])
def test_hidden_matrices_are_muons_and_all_else_is_adamws(tied: bool) -> None:
    model = mixtral(tie_word_embeddings=tied)
    matrices, others = groups_by_name(model, bexp.muon(model, lr=1e-3))
    assert matrices | others == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        outer = "embed_tokens" in name or "lm_head" in name
        assert (name in matrices) is (parameter.ndim == 2 and not outer), name
    assert any("experts" in name for name in others), "experts in one tensor are AdamW's"


def test_a_step_is_that_of_torchs_two_optimizers() -> None:
    model = mixtral()
    twin = copy.deepcopy(model)
    ours = bexp.muon(model, lr=1e-3, weight_decay=0.1)
    chosen, _ = groups_by_name(model, ours)
    named = dict(twin.named_parameters())
    theirs = [
        torch.optim.Muon([p for name, p in named.items() if name in chosen], 1e-3, 0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([p for name, p in named.items() if name not in chosen], 1e-3, weight_decay=0.1),
    ]
    texts = torch.randint(0, 64, (2, 32))
    for _ in range(3):
        for each, optimizers in ((model, [ours]), (twin, theirs)):
            each.zero_grad()
            each(input_ids=texts, labels=texts).loss.backward()
            for optimizer in optimizers:
                optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, named[name], rtol=1e-4, atol=1e-6)


def test_a_checkpoint_of_its_state_goes_on_alike_and_a_schedule_reaches_both() -> None:
    model = mixtral()
    optimizer = bexp.muon(model, lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    texts = torch.randint(0, 64, (2, 32))

    def step(each: Any, with_: torch.optim.Optimizer) -> None:
        each.zero_grad()
        each(input_ids=texts, labels=texts).loss.backward()
        with_.step()

    step(model, optimizer)
    schedule.step()
    twin = copy.deepcopy(model)
    resumed = bexp.muon(twin, lr=1.0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [group["lr"] for group in resumed.param_groups] == [5e-4, 5e-4]
    step(model, optimizer)
    step(twin, resumed)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_adapters_alone_are_muons_and_a_saved_embedding_is_adamws() -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"])
    model = peft.get_peft_model(mixtral(), lora)
    only = bexp.muon(model, lr=1e-3)
    assert [type(each).__name__ for each in only._steppers] == ["Muon"]
    saved = peft.get_peft_model(
        mixtral(), peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    )
    matrices, others = groups_by_name(saved, bexp.muon(saved, lr=1e-3))
    assert all("lora_" in name for name in matrices)
    assert len(others) == 2


def test_the_trainer_takes_it_with_a_schedule(tmp_path: Path) -> None:
    model = mixtral(num_hidden_layers=1)
    optimizer = bexp.muon(model, lr=1e-3)
    rows = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 4
    arguments = transformers.TrainingArguments(tmp_path, max_steps=2, report_to=[], use_cpu=True, save_strategy="no")
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer, None))
    trainer.train()
    assert len(optimizer.state) == len(list(model.parameters()))
    assert optimizer.param_groups[0]["lr"] == optimizer.param_groups[1]["lr"] < 1e-3


def test_an_older_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(RuntimeError, match=r"has no Muon: it needs torch 2\.9"):
        bexp.muon(nn.Linear(2, 2), lr=1e-3)


def test_a_model_without_these_methods_has_its_embeddings_alone_outside() -> None:
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 2))
    assert outer_modules(model) == [model[0]]
