"""Precisions `master`, float32 weights beside bfloat16 ones, and `upcast`, in which Axolotl keeps some in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bexp.explorer.cost.step import static_parts
from bexp.explorer.dimensions.recompute import Recompute
from bexp.workers.targets.transformers.model import META, BuildSettings, build_model
from bexp.workers.targets.transformers.training_run import LEARNING_RATE, TrainerOptimizer
from bexp.workers.training.optimizer import TrainingOptimizer
from tests.bexp.kernels.references import assert_same_values
from tests.workers.targets.transformers.targets import (
    HARDWARE,
    LLAMA,
    candidate,
    check_composed_peak,
    open_target,
    opened,
)

pytest.importorskip("transformers")
MASTER = {"training": {"precision": "master"}}
TIED = {**LLAMA, "tie_word_embeddings": True}
EMBEDDING, LAYER = 160 * 64, 2 * 64 + 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96
NUMBERS = EMBEDDING + 3 * LAYER + 64
"""Parameters of the small model whose head is its embedding."""


@pytest.mark.parametrize(("config", "numbers"), [(TIED, NUMBERS), (LLAMA, NUMBERS + EMBEDDING)], ids=["tied", "own"])
def test_the_promised_state_is_what_a_whole_model_holds(config: dict[str, Any], numbers: int) -> None:
    target, parts, request = opened(config, **MASTER)
    promised = static_parts(parts, request)
    assert (promised.parameters, promised.gradients) == (2 * numbers, 2 * numbers)
    assert (promised.master_weights, promised.optimizer_states) == (4 * numbers, 8 * numbers)
    with target.training_run(candidate(loss="library"), parts, request) as run:
        run.begin()
        run.micro_step(0)
        optimizer = run._optimizer._optimizer  # type: ignore[union-attr]  # it trains
        assert isinstance(optimizer, TrainingOptimizer)
        slices = [part for bucket in optimizer._buckets for part in bucket]
        gradients = [p.grad for p in run._model.parameters() if p.grad is not None]
        held = {
            "parameters": sum(p.nbytes for p in run._model.parameters()),
            "gradients": sum(gradient.nbytes for gradient in gradients),
            "master_weights": sum(part.weight.nbytes for part in slices),
            "optimizer_states": sum(moment.nbytes for part in slices for moment in part.moments),
        }
        assert held == promised.model_dump(include=set(held))
        assert {tensor.dtype for tensor in [*run._model.parameters(), *gradients]} == {torch.bfloat16}
        run.update()
        assert all(p.grad is None for p in run._model.parameters())


@pytest.mark.parametrize("size", [1, 4], ids=["the step is the peak", "the head is the peak"])
def test_the_composed_peak_is_that_of_the_whole_model(size: int) -> None:
    target, parts, request = opened(TIED, **MASTER)
    composed = check_composed_peak(target, parts, candidate(size, loss="library"), request)
    assert composed.optimizer.backward_peak_bytes == pytest.approx(4 * NUMBERS, rel=0.01), "all gradients in float32"
    assert (composed.saved == 0) is (size == 1), "the step decides the peak of a small micro-batch"


def test_a_step_clips_in_bfloat16_and_updates_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(64, generator=generator).to(torch.bfloat16)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.float())
    optimizer = TrainerOptimizer([ours], "adamw", master_weights=True)
    expected = torch.optim.AdamW([theirs], lr=LEARNING_RATE)
    for _ in range(40):
        gradient = torch.randn(64, generator=generator).to(torch.bfloat16)
        ours.grad = gradient.clone()
        nn.utils.clip_grad_norm_([ours], 1.0)
        theirs.grad = ours.grad.float()
        ours.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        expected.step()
    assert ours.grad is None
    assert isinstance(optimizer._optimizer, TrainingOptimizer)
    ((part,),) = optimizer._optimizer._buckets
    assert_same_values([part.weight], [theirs])
    assert torch.equal(ours, part.weight.to(torch.bfloat16))
    assert not torch.equal(ours, start), "steps that bfloat16 weights alone would lose"


def test_all_parameters_are_lowered_as_deepspeed_does(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = open_target(LLAMA)._resolved.config
    monkeypatch.setattr(resolved.model_class, "_keep_in_fp32_modules_strict", {"norm"})
    pure = build_model(resolved, BuildSettings(precision="pure"), META)
    master = build_model(resolved, BuildSettings(precision="master"), META)
    assert {p.dtype for p in pure.parameters()} == {torch.float32, torch.bfloat16}
    assert {p.dtype for p in master.parameters()} == {torch.bfloat16}


OLMOE: dict[str, Any] = {
    "model_type": "olmoe",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 160,
}
WIDE = ("norm", "embed_tokens", "lm_head", "mlp.gate.")


@pytest.mark.parametrize("config", [LLAMA, OLMOE], ids=["llama", "experts"])
def test_what_axolotl_casts_is_in_float32(config: dict[str, Any]) -> None:
    model = open_target(config, trainer="axolotl")._resolved.model
    for name, parameter in model.named_parameters():
        expected = torch.float32 if any(part in name for part in WIDE) else torch.bfloat16
        assert parameter.dtype is expected, name


@pytest.mark.parametrize(
    ("config", "recompute"), [(TIED, Recompute.FULL), (OLMOE, Recompute.NONE)], ids=["tied", "experts"]
)
def test_the_composed_peak_of_upcast_weights_is_the_models(config: dict[str, Any], recompute: Recompute) -> None:
    target, parts, request = opened(config, trainer="axolotl")
    experts = target.report(HARDWARE).default_experts
    tried = candidate(32, expert_backend=experts, loss="library", recompute=recompute)
    check_composed_peak(target, parts, tried, request)
