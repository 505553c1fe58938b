"""A short fuzz of configurations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forked_ranks import fork_server

pytest.importorskip("transformers")


@pytest.mark.slow(together="forked")
def test_odd_values_are_refused_at_submission_or_by_the_worker_or_work(tmp_path: Path) -> None:
    arguments = ("--types", "llama", "--cases", "4", "--seed", "2", "--minutes", "5")
    with (tmp_path / "printed").open("w+") as printed:
        process = fork_server().start("tests.chaos.fuzz_configurations", *arguments, output=printed.fileno())
        code = process.wait(550.0)
        printed.seek(0)
        said = printed.read()
    found = json.loads(said[said.index("{") :])  # Python 3.12 warns before it of a fork beside threads
    assert (found["violations"], code) == ([], 0)
    assert found["ends"].keys() >= {"refused at submission", "works"}
