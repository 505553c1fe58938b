"""Each trainer's answer is what its export says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.trainer_answers import answer_for_trainer, exports_of_table, for_trainer
from benchmarks.unseen.truth import draw_truth
from bexp.explorer.trainers.registry import TRAINERS

SEED = 8000001
TABLES = Path(__file__).parents[2] / "benchmarks" / "results" / "tables"


@pytest.mark.parametrize("name", TRAINERS)
def test_log_recommendation_python_and_export_have_one_micro_batch(name: str) -> None:
    answer = answer_for_trainer(SEED, name)
    assert answer is not None
    assert answer.agrees, answer
    assert len(answer.sizes) == 4
    assert answer.regret <= 0.05, "the largest of 287 recorded ones is 3.7%, on this device"


def test_a_trainer_is_explored_with_its_own_loss_and_nothing_that_it_cannot_be_told() -> None:
    drawn = draw_truth(SEED).request
    asked = for_trainer(drawn, "transformers")
    assert (drawn.training.loss.kind, asked.training.loss.kind) == ("chunked", "full")
    assert set(asked.recompute or ()) <= TRAINERS["transformers"].expresses["recompute"]
    assert asked.keeps_batch


def test_an_export_for_another_trainer_is_near_the_best_that_it_can_be_told() -> None:
    answers = list(exports_of_table(TABLES / "whole-moe-16-experts.jsonl", 1))
    assert {answer.trainer for answer in answers} == set(TRAINERS)
    assert all(answer.regret <= 0.01 for answer in answers)
    assert {answer.trainer for answer in answers if answer.one_candidate} == {"bexp"}
