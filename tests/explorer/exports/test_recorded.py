"""Exports of explorations that replay a recorded table, against all of its candidates."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from benchmarks.replay.ground_truth import GroundTruth
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.exports.choice import choose
from bexp.explorer.exports.exploration import ExportSource
from bexp.explorer.search.explore import explore
from bexp.explorer.trainers.registry import TRAINERS
from bexp.workers.replay.profiler import VirtualClock

TABLES = Path(__file__).parents[3] / "benchmarks" / "results" / "tables"


@cache
def explored(name: str) -> tuple[GroundTruth, ExportSource]:
    """A table, explored as if it were the device."""
    truth = GroundTruth.read(TABLES / f"{name}.jsonl")
    clock, trials, answer = VirtualClock(), [], None
    device = truth.device(0, clock)
    for step in explore(truth.request, truth.report, device, clock=clock, prune=lambda *_: truth.prune):
        if step.trial is not None:
            trials.append(step.trial)
        answer = step.answer or answer
    assert answer is not None
    return truth, ExportSource("job1", truth.request, truth.report, answer.recommendation, trials)


def told_to_torchtitan(truth: GroundTruth) -> dict[Candidate, float]:
    """Tokens/s of what torchtitan has a name for: the device's own kernels, and all layers recomputed or none."""
    batch_size = truth.request.batch_size
    assert batch_size is not None
    return {
        candidate: float(tokens)
        for candidate, tokens in zip(truth.table.candidates, truth.tokens_C, strict=True)
        if candidate.attention_backend == truth.report.default_attention
        and candidate.expert_backend == truth.report.default_experts
        and candidate.bta_tile is None
        and candidate.recompute in {Recompute.NONE, Recompute.FULL}
        and batch_size % candidate.micro_batch_size == 0
    }


@pytest.mark.parametrize("name", ["olmoe-zipf", "switch-like", "qwen3-8-layers", "whole-gpt-4-layers"])
def test_an_export_for_another_trainer_is_near_the_best_that_it_can_be_told(name: str) -> None:
    truth, source = explored(name)
    assert source.recommendation is not None
    choice = choose(TRAINERS["torchtitan"], source, truth.request, source.recommendation)
    told = told_to_torchtitan(truth)
    assert told[choice.candidate] >= 0.99 * max(told.values())
    assert choice.is_own is (name == "whole-gpt-4-layers"), "kernels of ours are the best for experts"
