"""Precision `upcast`: norms, embeddings, output layer and routers in float32, as Axolotl keeps them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bexp.explorer.cost.components import ComponentKind
from bexp.explorer.cost.composition import Composition
from bexp.explorer.cost.step import static_parts
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.recompute import Recompute
from bexp.workers.instruments.phases import PhaseClock
from bexp.workers.profiler.trials.component import measure_component, measure_optimizer
from bexp.workers.profiler.trials.whole_model import run_whole_model
from tests.workers.profiler.trials.test_optimizer import OneSecond
from tests.workers.targets.transformers.targets import HARDWARE, LLAMA, open_target, request_for

pytest.importorskip("transformers")
TIED = {**LLAMA, "tie_word_embeddings": True}
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
def test_the_composed_peak_is_that_of_the_whole_model(config: dict[str, Any], recompute: Recompute) -> None:
    target, request = open_target(config, trainer="axolotl"), request_for(config, trainer="axolotl")
    report = target.report(HARDWARE)
    parts, instruments, clock = report.parts, target._instruments, PhaseClock()
    assert parts is not None
    instruments.timer = OneSecond()
    tried = Candidate(
        micro_batch_size=32,
        attention_backend="sdpa",
        expert_backend=report.default_experts,
        num_query_groups=1,
        loss="library",
        recompute=recompute,
    )
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
