"""LLaMA-Factory: what it packs and trains by itself."""

from __future__ import annotations

import pytest
import yaml

from bexp.explorer.dimensions.place import EmptySpaceError
from bexp.explorer.exports.export import export
from bexp.explorer.search.legal_space import expressible
from bexp.explorer.trainers.document import ExportError
from tests.explorer.exports.samples import LENGTHS, candidate, exploration
from tests.explorer.formats.test_trainer_files import read


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
            with pytest.raises(ExportError, match=f"LLaMA-Factory cannot express packed rows as .*{attention}"):
                export("llamafactory", answer)
        asked = exploration(both[0], lengths=LENGTHS, batching="packed", trainer="llamafactory")
        assert asked.request is not None
        assert asked.report is not None
        if not packed:
            with pytest.raises(EmptySpaceError, match="cannot express packed rows"):
                expressible(both, lambda one: one, asked.request, asked.report)
            continue
        kept = expressible(both, lambda one: one, asked.request, asked.report)
        assert tuple(one.micro_batch_size for one in kept) == packed
    padded = exploration(candidate(2, attention_backend="flash_attention_3"), lengths=LENGTHS)
    assert yaml.safe_load(export("llamafactory", padded).text)["flash_attn"] == "fa3"


def test_embeddings_that_llamafactory_trains_with_a_new_vocabulary() -> None:
    for change in ({"resize_vocab": True}, {"add_special_tokens": "<a>,<b>"}):
        lora = read("llamafactory", **change).training.lora
        assert lora is not None
        assert lora.modules_to_save == ("embed_tokens", "lm_head")
    named = read("llamafactory", resize_vocab=True, additional_target="embed_tokens").training.lora
    assert named is not None
    assert named.modules_to_save == ("embed_tokens",)
