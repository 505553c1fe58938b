"""What exports tell a trainer of texts of unequal length."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.exports.export import export
from bexp.explorer.search.trainer_terms import formats_for
from bexp.explorer.trainers.document import ExportError
from tests.explorer.exports.samples import candidate, exploration

LENGTHS = {512: 30, 3000: 10}
FLASH = candidate(attention_backend="flash_attention_2")


def told(name: str, best: Candidate = FLASH, **asked: Any) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(export(name, exploration(best, lengths=LENGTHS, **asked)).text)
    return found


def test_packing_is_told_to_those_that_pack() -> None:
    packed = told("trl", batching="packed")
    assert {
        "packing": True,
        "packing_strategy": "bfd",
        "padding_free": True,
        "max_length": 4096,
    }.items() <= packed.items()
    packed = told("axolotl", batching="packed")
    assert packed["sample_packing"]
    assert packed["pad_to_sequence_len"]
    assert packed["sequence_len"] == 4096
    assert not packed["multipack_real_batches"], "flash attention gets one row"
    assert "sdpa_varlen" not in packed
    assert "sdpa_varlen" not in told("axolotl", candidate())
    packed = told("llamafactory", candidate(1, attention_backend="flash_attention_2"), batching="packed")
    assert (packed["packing"], packed["neat_packing"], packed["cutoff_len"]) == (True, True, 4096)
    assert not {"group_by_length", "train_sampling_strategy"} & packed.keys()


def test_groups_by_length_are_told_and_plain_padding_switches_both_off() -> None:
    for name in ("transformers", "trl", "llamafactory"):
        grouped = told(name, batching="grouped")
        assert grouped["train_sampling_strategy"] == "group_by_length"
        assert "group_by_length" not in grouped, "transformers 5.2 has no such field"
        assert "train_sampling_strategy" not in told(name)
    assert told("axolotl", batching="grouped")["group_by_length"] is True
    assert told("axolotl")["group_by_length"] is False
    assert told("axolotl")["sample_packing"] is False
    assert told("llamafactory")["packing"] is False
    assert told("trl")["packing"] is False


def test_a_header_says_what_was_measured() -> None:
    for batching, words in (
        ("padded", "measured padded to the longest of their micro-batch"),
        ("grouped", "measured grouped by length"),
        ("packed", "measured packed whole into rows of 4096 tokens"),
    ):
        header = export("python", exploration(FLASH, lengths=LENGTHS, batching=batching)).header
        assert any(words in line and "tokens/s leave padding out" in line for line in header)


def test_a_trainer_that_cannot_pack_is_refused() -> None:
    answer = exploration(FLASH, lengths=LENGTHS, batching="packed")
    for name in ("transformers", "megatron", "torchtitan", "cerebras"):
        with pytest.raises(ExportError, match="cannot express packed texts"):
            export(name, answer)
    assert answer.recommendation is not None
    listed = formats_for(answer.recommendation, answer.request)
    assert {"trl", "axolotl"} <= set(listed)
    assert not {"transformers", "megatron", "llamafactory"} & set(listed), "LLaMA-Factory packs single rows alone"
    one = exploration(candidate(1, attention_backend="flash_attention_2"), lengths=LENGTHS, batching="packed")
    assert one.recommendation is not None
    assert "llamafactory" in formats_for(one.recommendation, one.request)


def test_one_row_and_several_are_not_the_same_to_attention_with_a_mask() -> None:
    """TRL makes one row of a packed micro-batch, whose mask is as large as its square."""
    rows = exploration(lengths=LENGTHS, batching="packed")
    with pytest.raises(ExportError, match="TRL cannot express packed rows as attention 'sdpa' was measured with them"):
        export("trl", rows)
    axolotl = yaml.safe_load(export("axolotl", rows).text)
    assert (axolotl["multipack_real_batches"], axolotl["sdpa_varlen"]) == (True, False)
    one_row = exploration(lengths=LENGTHS, batching="packed", trainer="trl")
    assert yaml.safe_load(export("trl", one_row).text)["packing"] is True
    with pytest.raises(ExportError, match="Axolotl cannot express packed rows"):
        export("axolotl", one_row)
