"""Epochs of texts, cut into micro-batches, and what a few of these say of all."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from transformers.trainer_pt_utils import get_length_grouped_indices

from bexp.explorer.cost.part_costs import part_work, predict_part_bytes
from bexp.explorer.cost.request_texts import text_batches, tokens_per_sequence, widest
from bexp.explorer.cost.text_batches import NUM_DRAWN, TextBatch, cut_epochs, grouped_epoch, pack
from bexp.explorer.request.request import ExplorationRequest
from tests.explorer.cost.described import parts
from tests.explorer.cost.test_part_costs import layer

LENGTHS = {3: 500, 5: 300, 11: 150, 16: 40, 30: 10}


def asked(batching: str | None = None, seq_length: int = 32, **fields: Any) -> ExplorationRequest:
    return ExplorationRequest.model_validate(
        {
            "hf_config": {"model_type": "llama"},
            "hf_seq_length": seq_length,
            "lengths": LENGTHS,
            "batching": batching,
            **fields,
        }
    )


def batches(batching: str, size: int, **fields: Any) -> Any:
    found = text_batches(asked(batching, **fields), size)
    assert found is not None
    return found


def test_best_fit_keeps_texts_whole_and_rows_full() -> None:
    lengths = np.random.default_rng(0).integers(1, 40, 1000).tolist()
    rows = pack(lengths, 100)
    assert max(map(sum, rows)) <= 100
    assert Counter(n for row in rows for n in row) == Counter(lengths)
    assert sum(lengths) / (100 * len(rows)) > 0.99
    assert pack([60, 50, 40, 30, 20], 100) == [[60, 40], [50, 30, 20]]
    assert pack([100, 100], 100) == [[100], [100]]


@pytest.mark.parametrize("size", [2, 8, 32])
def test_texts_are_grouped_as_the_library_groups_those_of_a_step(size: int) -> None:
    lengths = np.random.default_rng(1).lognormal(5, 1, 2000).astype(np.int64) + 1
    ours = lengths[cut_epochs(grouped_epoch(lengths, 4 * size), size, 60 * (len(lengths) // size))].max(axis=1)
    order: list[int] = []
    for seed in range(60):
        epoch = get_length_grouped_indices(lengths.tolist(), 4 * size, None, torch.Generator().manual_seed(seed))
        order += epoch[: len(epoch) // size * size]
    theirs = lengths[np.array(order).reshape(-1, size)].max(axis=1)
    assert ours.mean() == pytest.approx(theirs.mean(), rel=0.03), "as far as drawn epochs tell"
    assert ours.max() == theirs.max()
    plain = lengths[cut_epochs(lambda s: np.random.default_rng(s).permutation(2000), size)].max(axis=1)
    assert ours.mean() < 0.95 * plain.mean()


def test_groups_are_made_of_the_texts_of_a_step_accumulation_included() -> None:
    many = {"lengths": {n: 100 * count for n, count in LENGTHS.items()}}
    alone, accumulated = batches("grouped", 16, **many), batches("grouped", 16, batch_size=128, **many)
    assert accumulated.expected_positions < alone.expected_positions
    assert batches("grouped", 16, batch_size=24, **many).expected_positions == alone.expected_positions


def test_a_mean_of_seconds_is_never_negative() -> None:
    found = batches("grouped", 4, lengths={100: 50, 300: 40, 1500: 10}, seq_length=2048)
    assert found.expect([0.0, 0.0, 0.0, 0.005])[0] == 0.0


@pytest.mark.parametrize("size", [1, 2, 16])
def test_widths_of_padded_micro_batches_have_their_probabilities(size: int) -> None:
    found = batches("padded", size)
    texts = np.repeat(list(LENGTHS), list(LENGTHS.values()))
    drawn = np.random.default_rng(0).choice(texts, (200_000, size)).max(axis=1)
    assert found.expected_positions == pytest.approx(size * drawn.mean(), rel=0.01)
    assert found.expected_pairs == pytest.approx(size * np.square(drawn).mean(), rel=0.01)
    assert found.share_N.sum() == pytest.approx(1)


@pytest.mark.parametrize("batching", ["padded", "grouped", "packed"])
def test_the_longest_is_measured_last_and_the_others_are_usual(batching: str) -> None:
    found = batches(batching, 2)
    *drawn, longest = found.measured
    assert len(drawn) == NUM_DRAWN
    assert all(batch.size == 2 for batch in found.measured)
    assert (longest.positions, longest.pairs) == max(zip(found.positions_N, found.pairs_N, strict=True))
    assert np.mean([batch.positions for batch in drawn]) == pytest.approx(found.expected_positions, rel=0.35)
    for batch in found.measured:
        assert all(sum(row) <= batch.width for row in batch.rows)
        assert batch.is_packed is (batching == "packed")
        assert batch.is_packed or batch.width == max(row[0] for row in batch.rows), "padded to its own longest"


def test_a_token_budget_is_filled_by_whole_texts_in_one_row_without_padding() -> None:
    packed, found = batches("packed", 8), batches("token_budget", 8)
    *drawn, longest = found.measured
    assert all(batch.size == 1 and batch.is_flattened for batch in found.measured)
    assert all(sum(batch.rows[0]) == batch.width <= 8 * 32 for batch in drawn)
    assert longest.positions == 8 * 32
    assert longest.pairs >= found.pairs_N.max()
    assert found.expected_positions < packed.expected_positions, "of as many tokens, without padding"
    assert found.expected_positions == pytest.approx(8 * tokens_per_sequence(parts(), asked("packed")))
    assert tokens_per_sequence(parts(), asked("token_budget")) == tokens_per_sequence(parts(), asked("packed"))
    assert widest(parts(), asked("token_budget")) == 32


def test_groups_pad_no_more_than_random_order_does_and_the_rarest_text_is_still_the_longest() -> None:
    rare = {"lengths": {100: 1_000_000, 4000: 10}, "seq_length": 4096}
    padded, grouped = batches("padded", 256, **rare), batches("grouped", 256, **rare)
    assert grouped.expected_positions <= padded.expected_positions
    assert grouped.longest.positions == padded.longest.positions == 256 * 4000


def test_where_all_that_is_measured_is_the_longest_the_mean_is_not_known_better_than_it_is() -> None:
    found = batches("padded", 256, lengths="lognormal(600, 1.0)", seq_length=4096)
    seconds = [1e-6 * batch.positions for batch in found.measured]
    mean, error = found.expect(seconds)
    truth = 1e-6 * found.expected_positions
    assert len(set(seconds)) == 1
    assert truth < seconds[0] * 0.99
    assert abs(mean - truth) <= 1.1 * error


def test_texts_of_one_length_are_one_micro_batch() -> None:
    found = batches("padded", 4, lengths={32: 7})
    assert not found.varies
    assert found.measured == (TextBatch(((32,),) * 4, 32),)
    assert found.expect([2.5]) == (2.5, 0.0)
    assert found.peaks([100]) == (100.0, 100.0)


def test_the_high_peak_is_one_of_so_many_micro_batches() -> None:
    found = batches("padded", 1, lengths={10: 99_950, 20: 50})
    assert found.peaks([100, 100, 100, 200]) == (pytest.approx(100.05), 100.0)
    found = batches("padded", 1, lengths={10: 99_800, 20: 200})
    assert found.peaks([100, 100, 100, 200])[1] == 200.0
    found = batches("padded", 1, lengths={10: 50, 15: 49, 20: 1})
    at = {10: 100, 15: 160, 20: 200}
    assert found.peaks([at[batch.positions] for batch in found.measured])[1] == 200.0


def test_tokens_of_a_sequence_are_those_of_texts() -> None:
    model = parts()
    assert tokens_per_sequence(model, asked(lengths=None)) == 32
    mean = sum(n * count for n, count in LENGTHS.items()) / 1000
    assert tokens_per_sequence(model, asked()) == pytest.approx(mean)
    assert tokens_per_sequence(model, asked("grouped")) == pytest.approx(mean)
    assert 31 < tokens_per_sequence(model, asked("packed")) <= 32
    cut = tokens_per_sequence(model, asked(seq_length=11))
    assert cut == pytest.approx(sum(min(n, 11) * count for n, count in LENGTHS.items()) / 1000)


def test_memory_is_predicted_for_the_longest_and_work_for_the_mean() -> None:
    model, component = parts(), layer(micro_batch_size=4)
    assert (widest(model, asked()), widest(model, asked("packed")), widest(model, asked(lengths=None))) == (30, 32, 32)
    whole, padded = (predict_part_bytes(component, model, one) for one in (asked(lengths=None), asked()))
    assert padded.saved == pytest.approx(30 / 32 * whole.saved)
    found = batches("padded", 4)
    kind = model.kind("dense")
    dense = component.model_copy(update={"part": "dense"})
    flops = found.expected_positions * kind.flops_per_token + found.expected_pairs / 32**2 * kind.flops_per_sequence
    assert part_work(dense, model, asked()).flops == pytest.approx(flops)
    assert part_work(dense, model, asked(lengths=None)) == part_work(dense, model)


@pytest.mark.parametrize("size", [1, 4, 32])
def test_new_widths_are_as_many_as_a_drawn_epoch_has(size: int) -> None:
    lengths = np.random.default_rng(1).lognormal(5.9, 0.8, 100_000 // size * size).round().clip(1, 2048).astype(int)
    widths = lengths.reshape(-1, size).max(axis=1)
    found = batches("padded", size, lengths=f"lognormal({np.exp(5.9 + 0.8**2 / 2)}, 0.8)", seq_length=2048)
    assert found.new_width_share == pytest.approx(len(np.unique(widths)) / len(widths), rel=0.05)


def test_counted_lengths_make_no_other_widths_and_packed_rows_have_one() -> None:
    assert batches("padded", 1).new_width_share == pytest.approx(5 / 1000, rel=1e-3)
    assert batches("packed", 2).new_width_share == batches("token_budget", 2).new_width_share == 0.0


@pytest.mark.parametrize("size", [1, 16])
def test_lengths_that_are_rounded_up_have_few_widths(size: int) -> None:
    lengths = 64 * np.ceil(np.random.default_rng(1).lognormal(5.9, 0.8, 80_000).clip(1, 8192) / 64).astype(int)
    counted = dict(zip(*(each.tolist() for each in np.unique(lengths, return_counts=True)), strict=True))
    widths = lengths.reshape(-1, size).max(axis=1)
    found = batches("padded", size, lengths=list(map(list, counted.items())), seq_length=8192)
    assert len(counted) > 64
    assert found.new_width_share == pytest.approx(len(np.unique(widths)) / len(widths), rel=0.1)
