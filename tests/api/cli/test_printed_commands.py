"""Every command that an answer prints can be run: of each trainer, in text, in JSON, in exports and on the page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bexp.api.cli.commands import COMMANDS
from bexp.api.stored import StoredExplorations
from bexp.explorer.answers.lines import render
from bexp.explorer.trainers.registry import FORMATS, TRAINERS, TrainerName
from bexp.storage.queue import Queue
from tests.api.cli.conftest import Run
from tests.api.cli.explored import explored

PAGE = (Path(__file__).parents[3] / "api" / "web" / "copy.js").read_text()
WORDS = re.compile(r'\bbexp ([a-z]+)((?: (?!-v for)[^\s`,;"]+)*)')
ASKED: dict[str, dict[str, Any]] = {
    **{name.value: {"trainer": name.value} for name in TrainerName},
    "no trainer": {},
    "an evaluation": {"mode": "eval"},
    "a batch that one divides alone": {"batch_size": 13, "trainer": "transformers"},
    "a batch that nothing divides": {"batch_size": 13, "micro_batch_size": [2, 4]},
    "two tries": {"budget": {"max_trials": 2, "confidence_target": 99}},
}


def commands(text: str, formats: list[str]) -> Iterator[list[str]]:
    """The commands in a text. NAME stands for each of the formats that it speaks of."""
    for name, words in WORDS.findall(text):
        arguments = words.partition(" >")[0].split()
        if name in COMMANDS:
            for each in formats if "NAME" in arguments else [""]:
                yield [name, *(each if word == "NAME" else word for word in arguments)]


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("bexp", ["database"], indirect=True)
def test_each_command_that_an_answer_prints_can_be_run(bexp: Run, queue: Queue, tmp_path: Path, asked: str) -> None:
    space = {"micro_batch_size": [1, 2], "attention_backends": None, "recompute": None, **ASKED[asked]}
    job_id = explored(queue, tmp_path, **space)
    stored = StoredExplorations(queue.database)
    said = stored.get(job_id).text
    assert said is not None
    shown = json.loads(bexp("best", job_id, "--json").stdout)
    listed = shown["job"]["own_formats"]
    texts = [render(said, 200, brief=brief) for brief in (True, False)]
    texts += [json.dumps(shown), bexp("best", job_id).stderr]
    texts += [bexp("best", job_id, "--format", name).stdout for name in listed]
    texts += [line.replace("${id}", job_id) for line in PAGE.splitlines() if "recommendation &&" in line]
    lines = "\n".join(texts).replace("${format}", "NAME").splitlines()
    found = {tuple(each) for line in lines for each in commands(line, listed)}
    assert ("best", job_id, "-v") in found or any("--format" in each or "--json" in each for each in found)
    for each in found:
        done = bexp(*each)
        assert done.code == 0, (each, done.stderr)
    if not listed:
        assert not any("--format" in each for each in found), "none that would be refused"


def test_each_format_is_that_of_one_trainer() -> None:
    named = [name for trainer in TRAINERS.values() for name in trainer.formats]
    assert sorted(named) == sorted(FORMATS), "and no format is written that no trainer reads"
    assert len(named) == len(set(named))
