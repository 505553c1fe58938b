"""What may be submitted as a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bexp.client.configuration import read_configuration

LLAMA = {"model_type": "llama", "hidden_size": 64}


@pytest.mark.parametrize("text", ['{"batch_size": 8}', "batch_size: 8\n"])
def test_a_path_and_its_text_are_the_same(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    assert read_configuration(path) == read_configuration(str(path)) == read_configuration(text) == {"batch_size": 8}


@pytest.mark.parametrize(
    ("config", "fields", "document"),
    [
        ({"batch_size": 8, "seed": 1}, {"batch_size": 16}, {"batch_size": 16, "seed": 1}),
        (LLAMA, {}, LLAMA),
        (LLAMA, {"batch_size": 8}, {"hf_config": LLAMA, "batch_size": 8}),
        ({**LLAMA, "time_step_limit": [0.0, float("inf")]}, {}, LLAMA),
        ({"batch_size": 8}, {"config": 1}, {"batch_size": 8, "config": 1}),  # what reads it knows no such field
        (LLAMA, {"seq_length": 32}, {"hf_config": LLAMA, "hf_seq_length": 32}),
        (
            {"model": {"seq_length": 64, "num_layers": 2}},
            {"seq_length": 32},
            {"model": {"seq_length": 32, "num_layers": 2}},
        ),
    ],
)
def test_fields_replace_those_of_the_configuration(
    config: dict[str, Any], fields: dict[str, Any], document: dict[str, Any]
) -> None:
    assert read_configuration(config, **fields) == document


@pytest.mark.parametrize("text", ["[1, 2]\n", "a: [\n", "just words\nin lines"])
def test_what_is_no_document_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="the configuration is"):
        read_configuration(text)
