"""A short fuzz, and that it would see a server error."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bexp.api.routes import explorations
from tests.chaos.fuzz import add_up, fuzz


def test_no_fuzzed_request_is_a_server_error_or_slow(tmp_path: Path) -> None:
    found = add_up([asyncio.run(fuzz(250, seed=1, folder=tmp_path, seconds=60.0))])
    assert found["violations"] == []
    assert found["requests"] == 250
    assert 0 < found["median_seconds"] <= found["p99_9_seconds"] <= found["slowest_seconds"] * 1.05  # type: ignore[operator]  # numbers
    assert {"200", "202", "404", "422"} <= set(found["statuses"])  # type: ignore[call-overload]  # a mapping


def test_a_server_error_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(explorations, "list_jobs", fail)
    found = asyncio.run(fuzz(60, seed=2, folder=tmp_path, seconds=60.0))
    assert any("status 500: GET /v1/explorations " in text for text in found.violations)
