"""Tiny jobs of the target `transformers`, opened on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from bexp.explorer.cost.components import ComponentKind
from bexp.explorer.cost.composition import Composition
from bexp.explorer.cost.step import static_parts
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.parts import ModelParts
from bexp.explorer.records.measurement import ComponentMeasurement
from bexp.explorer.request.request import ExplorationRequest
from bexp.workers.instruments.device_instruments import Instruments
from bexp.workers.instruments.phases import PhaseClock
from bexp.workers.profiler.trials.component import measure_component, measure_optimizer
from bexp.workers.profiler.trials.whole_model import run_whole_model
from bexp.workers.targets.transformers.target import TransformersTarget
from tests.workers.profiler import samples
from tests.workers.profiler.trials.test_optimizer import OneSecond

CPU = torch.device("cpu")
HARDWARE = samples.HARDWARE
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 160,
}
QWEN_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 160,
}


def request_for(config: dict[str, Any] = LLAMA, **fields: Any) -> ExplorationRequest:
    return ExplorationRequest.model_validate({"hf_config": config, "hf_seq_length": 16, "batch_size": 8, **fields})


def open_target(config: dict[str, Any] = LLAMA, **fields: Any) -> TransformersTarget:
    return TransformersTarget(request_for(config, **fields), Instruments(CPU))


def candidate(micro_batch_size: int = 1, **choices: Any) -> Candidate:
    """A candidate whose attention is the library's own choice."""
    own = {"attention_backend": "sdpa", "num_query_groups": 1}
    return Candidate.model_validate({"micro_batch_size": micro_batch_size, **own, **choices})


def opened(config: dict[str, Any] = LLAMA, **fields: Any) -> tuple[TransformersTarget, ModelParts, ExplorationRequest]:
    """A target with the parts in its report, and its request."""
    target = open_target(config, **fields)
    return target, parts_of(target), request_for(config, **fields)


def changed_by_a_step(run: Any) -> dict[str, bool]:
    """Whether a step of a training run changes each trained parameter, by name."""
    before = {name: p.detach().clone() for name, p in run._model.named_parameters() if p.requires_grad}
    run.begin()
    run.step()
    return {name: not torch.equal(p, before[name]) for name, p in run._model.named_parameters() if name in before}


def parts_of(target: TransformersTarget) -> ModelParts:
    """The parts in its report."""
    parts = target.report(HARDWARE).parts
    assert parts is not None
    return parts


@dataclass(frozen=True)
class ComposedPeak:
    """What a step keeps and has for a while beside its state, and the measured optimizer."""

    saved: float
    transient: float
    optimizer: ComponentMeasurement


def check_composed_peak(
    target: TransformersTarget, parts: ModelParts, tried: Candidate, request: ExplorationRequest
) -> ComposedPeak:
    """Assert that the peak that is composed of measured components is that of the whole model."""
    instruments, clock = target._instruments, PhaseClock()
    instruments.timer = OneSecond()
    table = Composition([tried], parts, request)
    found = [
        measure_optimizer(instruments, target, parts, component, tried, request, clock)
        if component.kind is ComponentKind.OPTIMIZER
        else measure_component(instruments, target, parts, component, request, clock)
        for component in table.components
    ]
    names = ("saved", "forward_peak", "backward_peak")
    sizes = [np.array([getattr(one, f"{name}_bytes") for one in found], float) for name in names]
    saved, transient = (float(each[0]) for each in table.activation_bytes(*sizes))
    whole = run_whole_model(instruments, target, parts, tried, request, clock)
    assert static_parts(parts, request).total + saved + transient == pytest.approx(whole.peak_bytes, rel=0.02)
    (optimizer,) = (one for one in found if one.component.kind is ComponentKind.OPTIMIZER)
    return ComposedPeak(saved, transient, optimizer)
