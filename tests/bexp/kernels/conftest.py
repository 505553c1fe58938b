from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bexp.kernels.experts.auto import plans


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the tables of `auto` that this test alone reads and writes."""
    monkeypatch.setenv("BEXP_EXPERT_TABLES", str(tmp_path))
    monkeypatch.delenv("BEXP_MEASURE_EXPERTS", raising=False)
    plans.read_table.cache_clear()
    yield tmp_path
    plans.read_table.cache_clear()
