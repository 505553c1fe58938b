from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import recorded_fidelity
from bexp.explorer.records.measurement import Outcome
from tests.simulated_tables import write
from tests.workers.replay import samples


def test_every_whole_model_is_compared_with_its_composition(tmp_path: Path) -> None:
    table, out = tmp_path / "small.jsonl", tmp_path / "fidelity.json"
    write(samples.recording(whole_model_share=1.0), table)
    assert recorded_fidelity.main([str(table), "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    recorded = samples.recording(whole_model_share=1.0)
    assert len(rows) == len([runs for runs in recorded.whole_models.values() if runs[0].outcome is Outcome.OK])
    errors = [row["check"]["step_error"] for row in rows]
    assert 0 < max(map(abs, errors)) < 0.1
    assert max(abs(row["check"]["peak_error"]) for row in rows) < 0.1


def test_a_slower_whole_model_is_a_composition_that_is_too_fast() -> None:
    recorded = samples.recording(whole_model_share=1.0)
    before = recorded_fidelity.compare("small", recorded)[0]
    candidate = next(c for c in recorded.whole_models if c.model_dump(mode="json") == before["candidate"])
    (run,) = recorded.whole_models[candidate]
    assert run.figures is not None
    slower = run.figures.model_copy(
        update={
            "micro_step_seconds": 2 * run.figures.micro_step_seconds,
            "optimizer_seconds": 2 * run.figures.optimizer_seconds,
            "peak_bytes": 2 * run.figures.peak_bytes,
        }
    )
    recorded.whole_models[candidate] = [run.model_copy(update={"figures": slower})]
    after = recorded_fidelity.compare("small", recorded)[0]
    assert 1 + after["check"]["step_error"] == pytest.approx((1 + before["check"]["step_error"]) / 2)
    assert 1 + after["check"]["peak_error"] == pytest.approx((1 + before["check"]["peak_error"]) / 2)


def test_a_failed_whole_model_is_named() -> None:
    recorded = samples.recording(whole_model_share=1.0)
    candidate, (run,) = next(iter(recorded.whole_models.items()))
    failed = run.model_copy(update={"figures": None, "outcome": Outcome.OUT_OF_MEMORY, "reason": "too large"})
    recorded.whole_models[candidate] = [failed]
    row = next(r for r in recorded_fidelity.compare("small", recorded) if r["check"] is None)
    assert (row["outcome"], row["reason"]) == ("out_of_memory", "too large")
