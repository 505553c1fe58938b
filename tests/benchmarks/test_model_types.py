"""The list of model types that a service knows is that of the installed library."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.model_types import ends_at_its_positions, find_tiny, main, starts_after_padding
from bexp.explorer.formats import model_types as read

pytest.importorskip("transformers")


def test_the_list_is_current_with_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    committed, known = read.FILE.read_text(), read.model_types()
    tried = {ends_at_its_positions: known.bounded, starts_after_padding: known.after_padding}
    monkeypatch.setattr(f"{main.__module__}.find_tiny", lambda names, holds: tried[holds])  # it takes a minute
    monkeypatch.setattr(read, "FILE", tmp_path / "types.txt")
    main()
    assert (tmp_path / "types.txt").read_text() == committed


def test_positions_end_where_a_tiny_model_fails() -> None:
    tried = ["bert", "bert-generation", "gpt2", "llama", "mamba", "opt"]
    assert find_tiny(tried, ends_at_its_positions) == [name for name in tried if name in read.model_types().bounded]


def test_the_first_position_of_some_types_is_the_one_after_padding() -> None:
    tried = ["biogpt", "gpt2", "opt", "roberta"]
    assert find_tiny(tried, starts_after_padding) == ["roberta"]
    assert read.model_types().after_padding.intersection(tried) == {"roberta"}
