"""The texts that contenders train on, and the seconds of a step on texts that differ in length."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.trainer_recipes import fields_of, recipe_of
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
    assert "attention_mask" not in batch, "the model tells texts apart by their positions"
    rows = [texts[place] for place in range(3000)]
    assert torch.tensor([len(row["input_ids"]) for row in rows]).float().mean() == pytest.approx(texts.mean, rel=0.05)


def test_texts_of_unequal_length_are_padded_and_have_the_mean_that_was_asked_for() -> None:
    texts, collator = Texts(100, 4096, "lognormal(300, 0.8)"), Collator()
    lengths = [len(texts[place]["input_ids"]) for place in range(20_000)]
    assert sum(lengths) / len(lengths) == pytest.approx(300, rel=0.05)
    batch = collator([texts[0], texts[1]])
    assert batch["attention_mask"].sum() == sum(lengths[:2])
    assert collator.positions == [2 * max(lengths[:2])]
    assert max(lengths) <= longest_text("lognormal(300, 0.8)", 4096) <= 4096


def test_a_token_a_new_width_and_an_update_have_their_seconds_whatever_the_lengths() -> None:
    positions = [10, 30, 20, 5, 60, 15, 40, 25, 35] * 2
    spent = [0.5 + 0.1 * n + (0.7 if i < 9 else 0.0) + (2.0 if i % 3 == 2 else 0.0) for i, n in enumerate(positions)]
    steps = [spent[i : i + 3] for i in range(0, 18, 3)]
    found = varied_seconds(steps, positions, 20, mean=25.0, new_share=0.1)
    assert found == pytest.approx(20 * (0.5 + 2.5 + 0.07) + 2.0)


def test_an_epoch_has_new_widths_until_all_have_occurred() -> None:
    texts = Texts(100, 64, "lognormal(20, 0.5)")
    mean, share = texts.epoch(4)
    assert 4 * 20 < mean < 4 * 64
    assert share == pytest.approx(52 / 25_000, rel=0.15)
    texts.repeat(8)
    assert len(texts[3]["input_ids"]) == len(texts[11]["input_ids"])


def test_a_recipe_is_what_the_exploration_was_asked_for() -> None:
    assert recipe_of(None) == {"optimizer": "adamw"}
    training = {"lora": {"r": 4}, "optimizer": {"name": "adamw_bnb_8bit"}}
    request = {"training": training, "quantization": "bnb_4bit", "batching": "packed"}
    recipe = recipe_of({"job": {"request": request}})
    assert recipe == {"lora": {"r": 4}, "quantization": "bnb_4bit", "optimizer": "adamw_bnb_8bit", "packed": True}
    assert fields_of(recipe) == {"optim": "adamw_bnb_8bit", "bf16": True}
    assert fields_of({"optimizer": "adamw"}) == {"optim": "adamw_torch_fused"}


@pytest.mark.parametrize(
    "request_",
    [
        {"batching": "token_budget"},
        *({"training": {"optimizer": {"name": name}}} for name in ("adamw_cpu_offload", "muon")),
    ],
)
def test_what_no_trainer_can_be_told_is_not_judged_as_something_else(request_: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="neither token budgets"):
        recipe_of({"job": {"request": request_}})
