"""The texts that contenders train on, and the seconds of a step on texts that differ in length."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.trainer_recipes import ON_HOST, fields_of, recipe_of
from benchmarks.trainer_runs import varied_seconds
from benchmarks.trainer_texts import IGNORED, Collator, Texts, longest_text, pack


def test_rows_of_packed_texts_hold_each_text_once_and_none_is_too_long() -> None:
    lengths = [7, 3, 5, 5, 2, 1, 8]
    rows = pack(lengths, 8)
    assert sorted(length for row in rows for length in row) == sorted(lengths)
    assert sorted(map(sum, rows)) == [7, 8, 8, 8]


def test_positions_of_packed_texts_begin_anew_and_their_first_labels_are_left_out() -> None:
    texts, collator = Texts(100, 64, "lognormal(20, 0.5)", packed=True), Collator()
    batch = collator([texts[0], texts[1]])
    starts = batch["position_ids"] == 0
    assert starts.sum() > 2
    assert batch["labels"][starts].unique().tolist() == [IGNORED]
    assert collator.tokens == [len(texts[0]["input_ids"]) + len(texts[1]["input_ids"])]
    assert "attention_mask" not in batch, "the model tells texts apart by their positions"
    rows = [texts[place] for place in range(3000)]
    assert torch.tensor([len(row["input_ids"]) for row in rows]).float().mean() == pytest.approx(texts.mean, rel=0.05)


def test_texts_of_unequal_length_are_padded_and_have_the_mean_that_was_asked_for() -> None:
    texts, collator = Texts(100, 4096, "lognormal(300, 0.8)"), Collator()
    lengths = [len(texts[place]["input_ids"]) for place in range(20_000)]
    assert sum(lengths) / len(lengths) == pytest.approx(300, rel=0.05)
    batch = collator([texts[0], texts[1]])
    assert batch["attention_mask"].sum() == sum(lengths[:2]) == collator.tokens[0]
    assert max(lengths) <= longest_text("lognormal(300, 0.8)", 4096) <= 4096


def test_a_token_and_an_update_have_their_seconds_whatever_the_lengths() -> None:
    tokens = [10, 30, 20, 5, 60, 15, 40, 5, 5]
    steps = [[tokens[i] * 0.1, tokens[i + 1] * 0.1, tokens[i + 2] * 0.1 + 2.0] for i in (0, 3, 6)]
    assert varied_seconds(steps, tokens, 200) == pytest.approx(22.0)
    assert varied_seconds([[1.0], [3.0]], [10, 30], 100) == pytest.approx(10.0)


def test_a_recipe_is_what_the_exploration_was_asked_for() -> None:
    assert recipe_of(None) == {"optimizer": "adamw"}
    training = {"lora": {"r": 4}, "optimizer": {"name": "adamw_bnb_8bit"}}
    request = {"training": training, "quantization": "bnb_4bit", "batching": "packed"}
    recipe = recipe_of({"job": {"request": request}})
    assert recipe == {"lora": {"r": 4}, "quantization": "bnb_4bit", "optimizer": "adamw_bnb_8bit", "packed": True}
    assert fields_of(recipe) == {"optim": "adamw_bnb_8bit", "bf16": True}
    assert fields_of({"optimizer": "adamw"}) == {"optim": "adamw_torch_fused"}


@pytest.mark.parametrize("request_", [{"batching": "token_budget"}, {"training": {"optimizer": {"name": ON_HOST}}}])
def test_what_no_trainer_can_be_told_is_not_judged_as_something_else(request_: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="neither token budgets"):
        recipe_of({"job": {"request": request_}})
