"""Tables that were recorded before devices could share sequences: read, with the spaces that they were recorded for."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from bexp.workers.replay.recording import Recording

TABLES = Path(__file__).parents[3] / "benchmarks" / "results" / "tables"


@pytest.mark.parametrize(
    ("name", "num_candidates", "num_components", "digest"),
    [
        ("gpt2-124m", 42, 72, "2a4099c968c1"),
        ("cerebras-gpt-24gib", 118, 106, "30d41a8ed34b"),
        ("whole-moe-16-experts", 48, 86, "2c886e46c4e5"),
    ],
)
def test_the_space_of_a_recorded_request_stays(
    name: str, num_candidates: int, num_components: int, digest: str
) -> None:
    recording = Recording.read(TABLES / f"{name}.jsonl")
    request = recording.header.request
    assert request.devices.context_parallel_sizes == (1,)
    found = recording.prune(request, request.shapes)
    told = "\n".join(candidate.describe() for candidate in found.legal.candidates)
    assert hashlib.sha256(told.encode()).hexdigest()[:12] == digest, "other candidates, or another order"
    assert len(found.legal.candidates) == num_candidates
    assert found.table is not None
    assert len(found.table.components) == num_components
    assert set(recording.components) & set(found.table.components)
