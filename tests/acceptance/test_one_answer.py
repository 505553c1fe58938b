"""One micro-batch in the log, the database, `best`, JSON, Python, the page and the trainer's file."""

from __future__ import annotations

import json
import re
import sqlite3

import pytest

import bexp
from tests.acceptance.conftest import Machine
from tests.acceptance.test_explore import RECOMMENDATION, TABLES

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("table", "trainer", "flag"), [("olmoe-zipf", "torchtitan", "--training.local_batch_size")])
def test_an_answer_for_a_trainer_says_one_micro_batch_everywhere(
    machine: Machine, table: str, trainer: str, flag: str
) -> None:
    """The recorded request leaves this trainer what it can be told: no tiles, and no expert kernels of ours."""
    recording = f"replay:{TABLES / 'results' / 'tables' / table}.jsonl"
    narrowed = ("micro_batch_size=[1,2,4]", "recompute=[none,full]", "bta.tiles=null", "expert_backends=null")
    fields = [word for field in narrowed for word in ("--set", field)]
    configuration = TABLES / "tables" / f"{table}.yaml"
    printed = machine.run("explore", configuration, "--device", recording, "--trainer", trainer, *fields)
    logged = [match[1] for match in map(RECOMMENDATION.fullmatch, printed.splitlines()) if match][-1]
    document = json.loads(machine.ask("best", "latest", "--json"))
    known = document["recommendation"]
    with sqlite3.connect(machine.database_url.removeprefix("sqlite:///")) as rows:
        ((stored,),) = rows.execute("SELECT micro_batch_size FROM bexp_recommendations ORDER BY seq DESC LIMIT 1")
    file = machine.ask("best", "latest", "--format", trainer)
    machine.ask("report", "latest", "--out", machine.folder / "report.html")
    data = re.findall(r'id="report">(.*?)</script>', (machine.folder / "report.html").read_text(), re.DOTALL)
    shown = json.loads(data[0])["exploration"]
    written = next(line.split()[1] for line in file.splitlines() if line.strip().startswith(flag))
    assert {
        "log": int(logged),
        "row": stored,
        "best": int(machine.ask("best", "latest")),
        "divides": int(machine.ask("best", "latest", "--divides")),
        "json": known["candidate"]["micro_batch_size"],
        "python": bexp.RecommendedSetup.read(document).micro_batch_size,
        "file": int(written),
        "page": shown["recommendation"]["candidate"]["micro_batch_size"],
    } == dict.fromkeys(("log", "row", "best", "divides", "json", "python", "file", "page"), int(logged))
    assert f"confidence {known['confidence']} out of 100" in printed.replace("confidence        ", "confidence ")
    assert "in place of the recommended" not in file
