"""list, delete and workers against a real API."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bexp.api.cli.errors import CommandError, ExitCode
from bexp.api.cli.job_ids import find_job
from bexp.api.cli.results import INDENT, conclude, print_json, say_best, table_lines, terminal_width
from bexp.api.stored import StoredExplorations
from bexp.client.client import Client
from bexp.client.errors import ProblemError, ServiceError
from bexp.client.explorations import Exploration
from bexp.explorer.answers.uses import next_rows
from bexp.explorer.records.event import EventCode, Progress
from bexp.explorer.records.recommendation import Answer
from bexp.explorer.request.request import ExplorationRequest
from bexp.storage.jobs import JobState
from bexp.storage.queue import Queue
from bexp.storage.workers import forget_worker, register_worker
from tests.api.cli.conftest import Run
from tests.api.cli.samples import ANSWER, RECOMMENDATION, REQUEST, TINY, event, job_document
from tests.contracts.samples import make_report, make_worker

ROOM = {"memory_bytes": 1 << 34, "memory_limit_bytes": 1 << 33}
REPORT = make_report().model_copy(update={"hardware": make_report().hardware.model_copy(update=ROOM)})


def test_explorations_are_found_by_label_and_deleted_when_they_have_ended(bexp: Run, config: Path) -> None:
    job_id = bexp("submit", config, "--label", "team=search", "--label", "run=x=1", "--fresh").stdout.strip()
    shown = bexp("list", "--label", "team=search", "--state", "queued").stdout
    assert job_id in shown
    assert "run=x=1 team=search" in shown
    (listed,) = json.loads(bexp("list", "--label", "run=x=1", "--model", TINY["model"]["name"], "--json").stdout)
    assert listed["labels"] == {"team": "search", "run": "x=1"}
    assert json.loads(bexp("list", "--label", "team=ads", "--json").stdout) == []
    for command in (["list"], ["submit", config]):
        refused = bexp(*command, "--label", "team")
        assert refused.code == 2
        assert "key=value" in refused.stderr
    refused = bexp("delete", job_id)
    assert refused.code == 2
    assert f"bexp cancel {job_id}" in refused.stderr
    bexp("cancel", job_id)
    assert bexp("delete", job_id[:8]).stderr == f"exploration {job_id} is deleted\n"
    assert bexp("best", job_id).code == 2


def test_what_else_a_deletion_is_refused_for_is_told(bexp: Run, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ProblemError(403, {"detail": "this token may only read"})

    job_id = bexp("submit", config, "--fresh").stdout.strip()
    monkeypatch.setattr(Client, "delete", refuse)
    monkeypatch.setattr(StoredExplorations, "delete", refuse)
    assert "this token may only read" in bexp("delete", job_id).stderr


def test_workers_are_listed_and_the_same_request_is_answered_from_what_is_stored(
    bexp: Run, queue: Queue, config: Path
) -> None:
    assert "bexp worker" in bexp("workers").stderr
    first = bexp("submit", config).stdout.strip()
    claim = queue.claim(make_worker("w-1", fingerprint=REPORT.hardware.fingerprint))
    assert claim is not None
    info = make_worker("w-1", num_devices=2, fingerprint=REPORT.hardware.fingerprint, devices="cpu")
    register_worker(queue.database, replace(info, memory_limit_bytes=REPORT.hardware.memory_limit_bytes))
    assert re.search(rf"measuring {first} +cpu +2 x A device ", bexp("workers").stdout)
    register_worker(queue.database, replace(make_worker("w-2", device_name="", devices="cpu"), held_by="by process 7"))
    waiting = bexp("workers")
    assert re.search(r"w-2 +waiting +cpu +- ", waiting.stdout)
    assert waiting.stderr == "w-2 waits: by process 7\n"
    gpus = [{"device": "cuda:0", "busy_share": 0.93, "temperature_celsius": 61}, {"device": "cuda:1", "busy_share": 0}]
    register_worker(queue.database, make_worker("w-2", devices="cuda:0-1", gpus=gpus))
    assert re.search(r"w-2 +idle +cuda:0-1 +A device +93% 61 C, 0% ", bexp("workers").stdout)
    forget_worker(queue.database, "w-2")
    queue.pin(claim.lease, REPORT)
    (variant,) = ANSWER.variants
    answer = Answer(variants=(variant.model_copy(update={"completed_target": 95}),))
    queue.finish(claim.lease, JobState.SUCCEEDED, last=Progress(recommendation=answer.recommendation, answer=answer))
    (worker,) = json.loads(bexp("workers", "--json").stdout)
    assert (worker["state"], worker["device_name"]) == ("idle", "A device")

    again = bexp("submit", config, "--watch")
    assert again.code == 0
    assert "BEXP110 " in again.stdout
    assert f"Answered from exploration {first}" in again.stdout
    found = bexp("best", "latest")
    assert found.stdout == "4\n"
    assert f"measured by exploration {first}" in found.stderr
    fresh = bexp("submit", config, "--fresh").stdout.strip()
    assert json.loads(bexp("list", "--json", "--limit", "1").stdout)[0]["id"] == fresh
    register_worker(queue.database, make_worker("own", name="me"))
    assert re.search("^own +reserved ", bexp("workers").stdout, re.MULTILINE)


WHOLE = """\
ID      STATE    MODEL       CREATED
aaaaaa  running  mmmmmmmmmm  today at 10
bbbbbb  queued   n           -
"""
BROKEN = """\
ID      STATE    MODEL
    CREATED
aaaaaa  running  mmmmmmmmmm
    today at 10
bbbbbb  queued   n
    -
"""
IN_PIECES = """\
ID
    STATE
    MODEL
    CREATED
aaaaaa
    running
    mmmmmmmmmm
    today at
        10
bbbbbb
    queued
    n
    -
"""


@pytest.mark.parametrize(
    ("width", "shown"), [(None, WHOLE), (40, WHOLE), (41, WHOLE), (39, BROKEN), (27, BROKEN), (14, IN_PIECES)]
)
def test_a_table_is_broken_between_columns_where_the_terminal_ends(width: int | None, shown: str) -> None:
    head = ("ID", "STATE", "MODEL", "CREATED")
    rows = [("a" * 6, "running", "m" * 10, "today at 10"), ("b" * 6, "queued", "n", "-")]
    assert "".join(f"{line}\n" for line in table_lines(head, rows, width)) == shown


@pytest.mark.parametrize("width", range(14, 50))
def test_a_cell_that_fits_into_a_line_of_its_own_is_not_broken(width: int) -> None:
    head, row = ("ID", "STATE", "MODEL", "CREATED"), ("a" * 6, "running", "m" * 10, "b 10")
    lines = list(table_lines(head, [row], width))
    assert max(map(len, lines)) <= width
    assert not any(line.startswith(2 * INDENT) for line in lines)


@pytest.mark.parametrize(("columns", "width"), [("20", 60), ("61", 61), ("119", 119), ("200", 120)])
def test_text_is_as_wide_as_the_terminal_within_what_can_be_read(
    monkeypatch: pytest.MonkeyPatch, columns: str, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert terminal_width() == width


def test_a_report_is_written_where_it_can_be(bexp: Run, config: Path, queue: Queue, tmp_path: Path) -> None:
    job_id = bexp("submit", config, "--fresh").stdout.strip()
    queue.request_cancel(job_id)
    written = bexp("report", job_id, "--out", tmp_path / "x.html")
    assert (written.code, written.stderr) == (0, f"wrote {tmp_path}/x.html\n")
    assert f'"{job_id}"' in (tmp_path / "x.html").read_text()
    refused = bexp("report", job_id, "--out", tmp_path / "none" / "x.html")
    assert (refused.code, refused.stderr) == (
        2,
        f"bexp: cannot write {tmp_path}/none/x.html: No such file or directory\n",
    )


NOTHING = Answer(
    variants=(ANSWER.variants[0].model_copy(update={"recommendation": None, "reason": "use zero3"}),)
).model_dump(mode="json")


@pytest.mark.parametrize(
    ("code", "known", "status", "begin", "said"),
    [
        (EventCode.SUCCEEDED, {}, ExitCode.ANSWER, "\nRecommended micro_batch_size: 4", ""),
        (
            EventCode.CANCELLED,
            {"state": "cancelled"},
            ExitCode.NO_ANSWER,
            "\nEnded early; the best micro_batch_size until then: 4 for tiny\n\n  batch",
            "bexp: it ended\n",
        ),
        (EventCode.CANCELLED, {"answer": None, "recommendation": None}, ExitCode.NO_ANSWER, "", "bexp: it ended\n"),
        (EventCode.NOTHING_FITS, {"answer": NOTHING, "recommendation": None}, ExitCode.NO_ANSWER, "\nNo recomm", ""),
        (EventCode.FAILED, {"answer": None, "recommendation": None}, ExitCode.SERVICE, "", "bexp: it ended\n"),
    ],
)
def test_the_end_of_an_exploration_is_its_answer_or_why_there_is_none(
    capsys: pytest.CaptureFixture[str], code: EventCode, known: dict[str, Any], status: ExitCode, begin: str, said: str
) -> None:
    job = Exploration.model_validate(job_document(**known))
    client: Any = SimpleNamespace(get=lambda _: job, run_reports=lambda _: ())
    last = event(9, code, "it ended")
    assert conclude(client, job.id, last, as_json=False, verbose=False) is status
    told = capsys.readouterr()
    assert (told.out[: len(begin)], bool(told.out), told.err) == (begin, bool(begin), said)
    assert conclude(client, job.id, last, as_json=True, verbose=False) is status
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert (found["job"]["id"], told.err) == (job.id, "")
    of_job = job.model_dump(mode="json")
    assert all(found[name] == of_job[name] for name in ("recommendation", "answer", "text"))
    assert ("target" in found) is (job.text is not None)


def test_a_program_is_given_no_number_that_json_does_not_have() -> None:
    with pytest.raises(ValueError, match="not JSON"):
        print_json({"noise": math.nan})


def test_the_best_so_far_is_said_if_the_service_answers(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_: str) -> None:
        raise ServiceError("it is away")

    known, nothing = (Exploration.model_validate(job_document(state)) for state in ("succeeded", "queued"))
    for answers in (lambda _: known, lambda _: nothing, fail):
        say_best(SimpleNamespace(get=answers), "job1")
    assert capsys.readouterr().err.splitlines() == [
        f"best so far: {RECOMMENDATION.candidate.describe()}",
        "  11,500 tokens/s per device, 1.23x base, confidence 87 out of 100",
        "nothing is recommended yet",
    ]


@pytest.mark.parametrize(
    ("target", "is_applied"), [("bexp", True), ("transformers", True), ("my-gpt", False), ("a", False)]
)
def test_the_answer_ends_with_the_commands_that_use_it(target: str, is_applied: bool) -> None:
    config = {"hf_config": {"model_type": "llama"}, "hf_seq_length": 64} if target == "transformers" else {}
    asked = REQUEST if target == "bexp" else ExplorationRequest.model_validate({"target": target, **config})
    rows = {row.label: row.text for row in next_rows("job1", RECOMMENDATION, asked)}
    assert list(rows) == ["next", "for a trainer", *(["for bexp.apply"] if is_applied else []), "as a page"]
    assert rows["as a page"] == "bexp report job1 --out report.html"
    assert rows["for a trainer"].startswith("bexp best job1 --format NAME, where NAME is")
    if target == "transformers":
        evaluated = next_rows("job1", RECOMMENDATION, asked.model_copy(update={"mode": "eval"}))
        assert not any("--format" in row.text for row in evaluated), "no training follows from it"


class Listed:
    """Explorations with these ids, the newest first."""

    def __init__(self, *ids: str) -> None:
        self.ids = ids

    def get(self, job_id: str) -> str:
        if job_id not in self.ids:
            raise ProblemError(404, {"title": "Not Found"})
        return job_id

    def list(self) -> Iterator[SimpleNamespace]:
        return (SimpleNamespace(id=job_id) for job_id in self.ids)


@pytest.mark.parametrize(
    ("given", "ids", "found"),
    [
        ("abcd", ["abcd1", "abc"], "abcd1"),
        ("abc", ["abc"], "abc"),
        ("abc", ["abcd1"], ProblemError),
        ("latest", ["b", "a"], "b"),
        ("latest", [], "there is no exploration yet"),
        ("abcd", ["x"], "no exploration begins with 'abcd'; `bexp list` shows them"),
        ("abcd", [f"abcd{n}" for n in range(5)], "begin with 'abcd': abcd0, abcd1, abcd2, abcd3, abcd4$"),
        ("abcd", [f"abcd{n}" for n in range(6)], "begin with 'abcd': abcd0, abcd1, abcd2, abcd3, abcd4, \\.\\.\\.$"),
        ("abcd", [*map(str, range(1999)), "abcd1"], "abcd1"),
        ("abcd", [*map(str, range(2000)), "abcd1"], "no exploration begins with 'abcd'"),
    ],
)
def test_the_first_four_characters_of_one_of_the_newest_ids_name_it(
    given: str, ids: list[str], found: str | type[Exception]
) -> None:
    client: Any = Listed(*ids)
    if found in ids:
        assert str(find_job(client, given)) == found
    elif isinstance(found, str):
        with pytest.raises(CommandError, match=found) as caught:
            find_job(client, given)
        assert caught.value.code is ExitCode.USAGE
    else:
        with pytest.raises(found):
            find_job(client, given)
