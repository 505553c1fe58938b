"""The list of model types that a service knows is that of the installed library."""

from __future__ import annotations

from pathlib import Path

import pytest

from bexp.explorer.formats import model_types as read
from bexp.workers.targets.transformers.model_types import find_bounded, main

pytest.importorskip("transformers")


def test_the_list_is_current_with_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    committed, bounded = read.FILE.read_text(), read.model_types().bounded
    monkeypatch.setattr(f"{main.__module__}.find_bounded", lambda names: bounded)  # it takes a minute
    monkeypatch.setattr(read, "FILE", tmp_path / "types.txt")
    main()
    assert (tmp_path / "types.txt").read_text() == committed


def test_positions_end_where_a_tiny_model_fails() -> None:
    tried = ["bert", "bert-generation", "gpt2", "llama", "mamba", "opt"]
    assert find_bounded(tried) == [name for name in tried if name in read.model_types().bounded]
