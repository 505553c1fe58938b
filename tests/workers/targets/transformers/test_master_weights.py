"""Precision `master`: what a step beside float32 master weights holds, in its parts and in the whole model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bexp.explorer.cost.components import ComponentKind
from bexp.explorer.cost.composition import Composition
from bexp.explorer.cost.step import static_parts
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.parts import ModelParts
from bexp.workers.instruments.phases import PhaseClock
from bexp.workers.profiler.trials.component import measure_component, measure_optimizer
from bexp.workers.profiler.trials.whole_model import run_whole_model
from bexp.workers.targets.transformers.model import META, BuildSettings, build_model
from bexp.workers.targets.transformers.target import TransformersTarget
from bexp.workers.targets.transformers.training_run import LEARNING_RATE, TrainerOptimizer
from bexp.workers.training.optimizer import TrainingOptimizer
from tests.bexp.kernels.references import assert_same_values
from tests.workers.profiler.trials.test_optimizer import OneSecond
from tests.workers.targets.transformers.targets import HARDWARE, LLAMA, open_target, request_for

pytest.importorskip("transformers")
MASTER = {"training": {"precision": "master"}}
TIED = {**LLAMA, "tie_word_embeddings": True}
EMBEDDING, LAYER = 160 * 64, 2 * 64 + 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96
NUMBERS = EMBEDDING + 3 * LAYER + 64
"""Parameters of the small model whose head is its embedding."""


def opened(config: dict[str, Any]) -> tuple[TransformersTarget, ModelParts]:
    target = open_target(config, **MASTER)
    parts = target.report(HARDWARE).parts
    assert parts is not None
    return target, parts


def candidate(micro_batch_size: int) -> Candidate:
    return Candidate(micro_batch_size=micro_batch_size, attention_backend="sdpa", num_query_groups=1, loss="library")


@pytest.mark.parametrize(("config", "numbers"), [(TIED, NUMBERS), (LLAMA, NUMBERS + EMBEDDING)], ids=["tied", "own"])
def test_the_promised_state_is_what_a_whole_model_holds(config: dict[str, Any], numbers: int) -> None:
    target, parts = opened(config)
    request = request_for(config, **MASTER)
    promised = static_parts(parts, request)
    assert (promised.parameters, promised.gradients) == (2 * numbers, 2 * numbers)
    assert (promised.master_weights, promised.optimizer_states) == (4 * numbers, 8 * numbers)
    with target.training_run(candidate(1), parts, request) as run:
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
    target, parts = opened(TIED)
    request, instruments, clock = request_for(TIED, **MASTER), target._instruments, PhaseClock()
    instruments.timer = OneSecond()
    table = Composition([candidate(size)], parts, request)
    found = [
        measure_optimizer(instruments, target, parts, component, candidate(size), request, clock)
        if component.kind is ComponentKind.OPTIMIZER
        else measure_component(instruments, target, parts, component, request, clock)
        for component in table.components
    ]
    sizes = [
        np.array([getattr(one, f"{name}_bytes") for one in found], float)
        for name in ("saved", "forward_peak", "backward_peak")
    ]
    saved, transient = (float(each[0]) for each in table.activation_bytes(*sizes))
    (stepped,) = (one for one in found if one.component.kind is ComponentKind.OPTIMIZER)
    assert stepped.backward_peak_bytes == pytest.approx(4 * NUMBERS, rel=0.01), "all gradients in float32"
    assert (saved == 0) is (size == 1), "the step decides the peak of a small micro-batch"
    whole = run_whole_model(instruments, target, parts, candidate(size), request, clock)
    assert static_parts(parts, request).total + saved + transient == pytest.approx(whole.peak_bytes, rel=0.02)


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
