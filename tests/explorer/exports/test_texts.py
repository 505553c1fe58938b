"""What exports tell a trainer of texts of unequal length."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.exports.export import export
from bexp.explorer.records.recommendation import TextFigures
from bexp.explorer.search.legal_space import EmptySpaceError, expressible
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


def test_axolotl_is_told_to_cut_texts_as_measured() -> None:
    """By itself it drops those that are longer than a sequence."""
    for batching in ("padded", "grouped", "packed"):
        assert told("axolotl", batching=batching)["excess_length_strategy"] == "truncate"
    assert "excess_length_strategy" not in yaml.safe_load(export("axolotl", exploration()).text)


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
        with pytest.raises(ExportError, match="cannot be told packed texts"):
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
    with pytest.raises(ExportError, match="TRL cannot be told packed rows as attention 'sdpa' was measured with them"):
        export("trl", rows)
    axolotl = yaml.safe_load(export("axolotl", rows).text)
    assert (axolotl["multipack_real_batches"], axolotl["sdpa_varlen"]) == (True, False)
    one_row = exploration(lengths=LENGTHS, batching="packed", trainer="trl")
    assert yaml.safe_load(export("trl", one_row).text)["packing"] is True
    with pytest.raises(ExportError, match="Axolotl cannot be told packed rows"):
        export("axolotl", one_row)


def test_llamafactory_packs_for_flash_attention_in_single_rows_alone() -> None:
    """With fa2 it asserts that a micro-batch is one row; with fa3 it makes another mask."""
    sizes = {"flash_attention_2": (1,), "flash_attention_3": (), "sdpa": (1, 2)}
    for attention, packed in sizes.items():
        both = [candidate(size, attention_backend=attention) for size in (1, 2)]
        for best in both:
            answer = exploration(best, lengths=LENGTHS, batching="packed")
            if best.micro_batch_size in packed:
                assert yaml.safe_load(export("llamafactory", answer).text)["neat_packing"] is True
                continue
            with pytest.raises(ExportError, match=f"LLaMA-Factory cannot be told packed rows as .*{attention}"):
                export("llamafactory", answer)
        asked = exploration(both[0], lengths=LENGTHS, batching="packed", trainer="llamafactory")
        assert asked.request is not None
        assert asked.report is not None
        if not packed:
            with pytest.raises(EmptySpaceError, match="cannot be told packed rows"):
                expressible(both, lambda one: one, asked.request, asked.report)
            continue
        kept = expressible(both, lambda one: one, asked.request, asked.report)
        assert tuple(one.micro_batch_size for one in kept) == packed
    padded = exploration(candidate(2, attention_backend="flash_attention_3"), lengths=LENGTHS)
    assert yaml.safe_load(export("llamafactory", padded).text)["flash_attn"] == "fa3"


@pytest.mark.parametrize("batching", ["padded", "grouped"])
def test_a_run_as_the_python_module_says_is_as_measured(batching: str, caplog: pytest.LogCaptureFixture) -> None:
    figures = TextFigures(
        batching=batching,
        num_texts=40,
        num_cut=0,
        counted=True,
        tokens_per_sequence=1134.0,
        padding_share=0.1,
        expected_peak_bytes=1,
        high_peak_bytes=1,
        out_of_memory_probability=0.0,
    )
    answer = exploration(candidate(2), lengths=LENGTHS, batching=batching, known={"texts": figures})
    scope: dict[str, Any] = {}
    exec(export("python", answer).text, scope)
    bexp, told = scope["bexp"], scope["RECOMMENDATION"]
    setup = bexp.RecommendedSetup.read(told)
    assert (setup.batching, setup.tokens_per_sequence) == (batching, 1134.0)
    callback, model = bexp.TrainerCallback(told), _Model()
    arguments = scope["training_arguments"](output_dir="out", use_cpu=True)
    state = SimpleNamespace(is_world_process_zero=True, global_step=0, max_steps=100, num_input_tokens_seen=0)
    with caplog.at_level(logging.INFO, "bexp"):
        callback.on_train_begin(arguments, state, None, model=model)
        mask = (torch.arange(3000) < torch.tensor([[512], [3000]])).long()
        model(input_ids=torch.ones(2, 3000, dtype=torch.long), attention_mask=mask)
        for _ in range(5):
            callback.on_step_begin(arguments, state, None)
            callback.on_step_end(arguments, state, None)
        callback.on_train_end(arguments, state, None)
    assert callback.report is not None
    assert "not as measured" not in caplog.text
    per_micro_batch = callback.report.tokens_per_second * callback.report.seconds / callback.report.steps
    assert per_micro_batch == pytest.approx(2 * 1134.0)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        return input_ids
