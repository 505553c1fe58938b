from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import model_zoo

TRAINER = """
trainer:
  init:
    model: {%s, num_hidden_layers: 2, num_heads: 2, hidden_size: 64, filter_size: 128, vocab_size: 512}
"""
FILES = {
    "models/nlp/a.yaml": TRAINER % "name: gpt3",
    "models/nlp/b.yaml": TRAINER % "name: bert",
    "models/nlp/c.yaml": TRAINER % "name: llama, an_invention: 1",
    "data/d.yaml": "a: 1",
}


def test_the_table_counts_what_is_accepted_and_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES.items():
        path = tmp_path / "zoo" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["model_zoo", str(tmp_path / "zoo"), "--release", "9", "--out", str(out)])
    model_zoo.main()
    result = json.loads(out.read_text())
    assert [(row["file"], row["accepted"], row.get("kind")) for row in result["files"]] == [
        ("nlp/a.yaml", True, None),
        ("nlp/b.yaml", False, "not decoder-only"),
        ("nlp/c.yaml", False, "missed"),
    ]
    assert result["summary"]["models_with_features_that_exist_here"] == 2
    assert result["summary"]["accepted_share_of_them"] == 0.5


def test_the_recorded_table_reaches_its_goal() -> None:
    """At least 80% of the published decoder-only models with features that exist here are accepted."""
    result = json.loads(model_zoo.OUT.read_text())
    assert result["summary"]["files"] == len(result["files"]) == 113
    assert result["summary"]["accepted_share_of_them"] >= 0.8
    for row in result["files"]:
        assert row["accepted"] or row["kind"] == model_zoo.classify(tuple(row["reasons"]))
        assert all("\n" not in reason and len(reason) < 250 for reason in row.get("reasons", ()))
