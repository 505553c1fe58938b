"""How long texts are: what is read, what is refused, and what a sequence cuts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from bexp.explorer.formats.document import FormatError
from bexp.explorer.formats.request import parse_request
from bexp.explorer.model.lengths import EPOCH_TEXTS, MAX_DISTINCT_LENGTHS, Lengths, parse_lengths
from bexp.explorer.request.request import ExplorationRequest

MODEL: dict[str, Any] = {"hf_config": {"model_type": "llama"}, "hf_seq_length": 1024}


def build(**fields: Any) -> ExplorationRequest:
    return ExplorationRequest.model_validate(MODEL | fields)


def test_a_request_without_lengths_is_stored_as_before() -> None:
    assert not {"lengths", "batching"} & build().model_dump().keys()
    assert build().batching_of_texts is None


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"9": 1, "0": 3}, "the length in tokens in entry 2 must be a whole number from 1 on"),
        ({"many": 3}, "the length in tokens in entry 1 must be a whole number from 1 on"),
        ({"12": 0}, "the number of texts in entry 1 must be a whole number from 1 on"),
        ({}, "has no lengths"),
        ([[1, 2, 3]], "entry 1 is no pair of a length in tokens and its number of texts"),
        ("uniform(3, 4)", "as a text they are lognormal(mean, sigma)"),
        ("lognormal(many, 1)", "number"),
        ("lognormal(600, 0)", "greater than 0"),
        ("lognormal(0.5, 1)", "greater than or equal to 1"),
        ({"lognormal": {"mean": 4, "sigma": 1}, "histogram": {"4": 1}}, "either a histogram or a lognormal"),
        ({str(n): 1 for n in range(1, MAX_DISTINCT_LENGTHS + 2)}, f"at most {MAX_DISTINCT_LENGTHS} items"),
        ({str(1 << 25): 1}, "less than or equal to 16777216"),
        (7, "either a histogram or a lognormal"),
    ],
)
def test_a_sentence_says_what_is_no_length(given: Any, sentence: str) -> None:
    with pytest.raises(FormatError) as caught:
        parse_request(MODEL | {"lengths": given})
    assert sentence in str(caught.value)
    assert "lengths" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"batching": "packed"}, "batching needs lengths"),
        ({"lengths": {8: 1}, "num_devices": 2}, "are measured on one device"),
        ({"lengths": {8: 1}, "execution": "compile"}, "run with execution 'eager'"),
        ({"lengths": {8: 1}, "execution": ["eager", "graph"]}, "run with execution 'eager'"),
        ({"lengths": {8: 1}, "batching": "packed", "bta": {"enable": True}}, "attention tiles divide padded rows"),
        (
            {"lengths": {8: 1}, "batching": "packed", "trainer": "transformers"},
            "cannot express packed texts; these can",
        ),
        ({"lengths": {8: 1}, "trainer": "megatron"}, "cannot express padded texts"),
        ({"lengths": {8: 1}, "batching": "by_tokens"}, "'padded', 'grouped', 'packed' or 'token_budget'"),
    ],
)
def test_a_rule_says_what_does_not_go_with_texts_of_unequal_length(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError) as caught:
        build(**fields)
    assert sentence in str(caught.value)


def test_texts_that_are_longer_than_a_sequence_are_cut_and_counted() -> None:
    texts = Lengths.model_validate({"histogram": {100: 5, 1024: 1, 1025: 2, 4000: 3}}).cut(1024)
    assert (texts.lengths, texts.counts, texts.num_cut) == ((100, 1024), (5, 6), 5)
    assert texts.num_texts == 11
    assert texts.mean == pytest.approx((500 + 6 * 1024) / 11)


@pytest.mark.parametrize(("mean", "sigma", "seq_length"), [(600, 1.0, 4096), (200, 0.5, 8192), (30, 2.0, 512)])
def test_a_distribution_has_the_moments_of_its_draws(mean: float, sigma: float, seq_length: int) -> None:
    texts = build(lengths=f"lognormal({mean}, {sigma})").lengths
    assert texts is not None
    found = texts.cut(seq_length)
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - sigma**2 / 2, sigma, 400_000)
    cut = np.clip(np.round(drawn), 1, seq_length)
    counts = np.array(found.counts)
    assert found.num_texts == pytest.approx(EPOCH_TEXTS)
    assert found.mean == pytest.approx(cut.mean(), rel=0.01)
    second = counts @ np.square(np.array(found.lengths, float)) / counts.sum()
    assert second == pytest.approx(np.square(cut).mean(), rel=0.02)
    assert found.num_cut / EPOCH_TEXTS == pytest.approx((drawn > seq_length + 0.5).mean(), abs=0.001)
    assert found.lengths[-1] <= seq_length
    beyond = (drawn > found.lengths[-1]).mean() if found.num_cut < 1 else 0.0
    assert beyond <= 1e-4, "an epoch hardly meets a longer text"
    assert len(found.lengths) <= MAX_DISTINCT_LENGTHS


def test_a_file_has_a_length_a_line_or_json() -> None:
    lines = parse_lengths("12\n\n 7 \n12\n")
    assert lines == {"histogram": [[7, 1], [12, 2]]}
    assert parse_lengths("[12, 7, 12]") == lines
    assert parse_lengths('{"7": 1, "12": 2}') == lines
    assert parse_lengths('{"histogram": [[7, 1], [12, 2]]}') == lines


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "it has no lengths"),
        ("12\n0\n", "'0' in line 2 must be a whole number from 1 on"),
        ("12\nabout 9\n", "'about 9' in line 2 must be a whole number from 1 on"),
        ("[12, 0]", "length 2 must be a whole number from 1 on"),
        ('{"7": "x"}', "the number of texts in entry 1 must be a whole number from 1 on"),
        ("[1, ", "neither one length a line nor JSON"),
    ],
)
def test_a_file_that_has_something_else_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_lengths(text)
