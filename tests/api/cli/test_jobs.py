"""submit, watch, best, list and cancel against a real API."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bexp.api.examples import RUN_REPORT
from bexp.client.client import Client
from bexp.client.explorations import Exploration
from bexp.explorer.records.event import EventCode
from bexp.explorer.records.recommendation import Answer, Role, VariantAnswer
from bexp.explorer.records.run_report import RunReport
from bexp.storage.jobs import JobState
from bexp.storage.queue import Queue
from tests.api.cli.conftest import Run
from tests.api.cli.samples import ANSWER, REQUEST, UNDIVIDED, job_document
from tests.explorer.alternatives import without

LINE = re.compile(r"BEXP\d{3} \d\d:\d\d:\d\d GMT  \S.*")
RECOMMENDED = re.compile(
    r"BEXP202 \d\d:\d\d:\d\d GMT  Current recommended micro_batch_size: 4, "
    r"estimated performance: 1\.23x base, confidence score: 87 \(out of 100\)"
)
Worker = Callable[..., AbstractContextManager[None]]


@pytest.mark.parametrize("bexp", ["database"], indirect=True)
@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        ("--quick", "quick", True),
        ("", "fresh", False),
        ("--seq-length 16", "model.seq_length", 16),
        ("--max-seconds 5", "budget.max_seconds", 5),
        ("--max-trials 3", "budget.max_trials", 3),
        ("--confidence-target 50", "budget.confidence_target", 50),
        ("--num-devices 2", "num_devices", 2),
        ("--seed 7", "seed", 7),
        ("--mode eval", "mode", "eval"),
        ("--execution compile", "execution", "compile"),
        ("--memory-limit-gib 2.5", "memory_limit_gib", 2.5),
        ("--headroom 0.25", "headroom", 0.25),
        ("--prefer memory", "prefer", "memory"),
        ("--target bexp", "target", "bexp"),
        ("--set tolerance=0.05", "tolerance", 0.05),
        ("--fresh", "fresh", True),
        ("--optim sgd", "training.optimizer.name", "sgd"),
        ("--trainer deepspeed", "trainer", "deepspeed"),
        ("--label a=b --label c=d", "labels", {"a": "b", "c": "d"}),
        ("--batch-size 48 --set batch_size=72", "batch_size", 72),
        ("--micro-batch-size 4", "micro_batch_size", 4),
        ("--micro-batch-size auto", "micro_batch_size", "auto"),
        ("--micro-batch-size explore", "micro_batch_size", "explore"),
        ("--micro-batch-size 2,4", "micro_batch_size", [2, 4]),
        ("--micro-batch-size 2-4", "micro_batch_size", {"explore": {"min": 2, "max": 4}}),
        ("--device cpu", "device_kind", "cpu"),
        ("--device cuda", "device_kind", "cuda"),
    ],
)
def test_an_option_stands_for_a_field(bexp: Run, config: Path, options: str, field: str, value: Any) -> None:
    done = bexp("submit", config, *options.split(), "--json")
    assert done.code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["priority"] == 0
    found = document["request"]
    for name in field.split("."):
        found = found[name]
    assert found == value


def test_watch_prints_lines_then_the_answer_and_writes_the_log(bexp: Run, config: Path, worker: Worker) -> None:
    with worker():
        done = bexp("submit", config, "--watch")
    assert done.code == 0
    assert not list(Path().rglob("run_*.log")), "nobody has asked for a file"
    lines, _, answer = done.stdout.partition("\n\n")
    assert all(LINE.fullmatch(line) for line in lines.splitlines())
    assert any(RECOMMENDED.fullmatch(line) for line in lines.splitlines())
    assert answer.startswith("Recommended micro_batch_size: 4 for tiny")
    job_id = done.stderr.split()[1]
    assert bexp("log", job_id).stdout == lines + "\n"

    log = Path("logs/local_compile_train/tiny") / f"run_{job_id}.log"
    for _ in range(2):
        again = bexp("watch", job_id, "--log-dir", "logs")
        assert (again.code, again.stdout, again.stderr) == (0, done.stdout, f"log file: {log}\n")
        assert log.read_text() == lines + "\n"


def test_best_prints_the_bare_number(bexp: Run, config: Path, worker: Worker, queue: Queue) -> None:
    job_id = bexp("submit", config).stdout.strip()
    before = bexp("best", job_id)
    assert (before.code, before.stdout) == (1, "")
    assert before.stderr == "bexp: no recommendation: the exploration is queued\n"
    with worker():
        bexp("watch", job_id)
    done = bexp("best", job_id)
    assert (done.code, done.stdout, done.stderr) == (0, "4\n", "")
    queue.write_notes(job_id, "tried twice\nslow")
    whole = bexp("best", job_id, "-v").stdout
    assert f"bexp report {job_id} --out report.html" in whole
    assert whole.endswith("\n\nNotes\n  tried twice\n  slow\n")
    everything = json.loads(bexp("best", job_id, "--json").stdout)
    assert everything["recommendation"]["candidate"]["bta_tile"] == 2
    assert (everything["target"], everything["target_version"], everything["allocator"]) == ("bexp", None, "default")
    assert everything["run_reports"] == []


def test_best_without_an_answer_names_the_newest_exploration_that_has_one(
    bexp: Run, config: Path, worker: Worker
) -> None:
    with worker():
        answered = bexp("submit", config, "--label", "run=first", "--watch").stderr.split()[1]
    cancelled = bexp("submit", config, "--set", "fresh=true").stdout.strip()
    bexp("cancel", cancelled)
    done = bexp("best", "latest")
    assert (done.code, done.stdout) == (1, "")
    assert done.stderr.splitlines()[1:] == [f"  the newest with one: `bexp best {answered}` (tiny, run=first)"]
    assert len(bexp("best", cancelled).stderr.splitlines()) == 1  # it was named


def test_best_names_the_micro_batch_that_divides(bexp: Run, config: Path, worker: Worker) -> None:
    variant = ANSWER.variants[0].model_copy(update={"recommendation": UNDIVIDED})
    with worker(Answer(variants=(variant,))):
        job_id = bexp("submit", config, "--watch").stderr.split()[1]
    done = bexp("best", job_id)
    assert (done.code, done.stdout) == (0, "4\n")
    assert done.stderr == (
        f"warning: 4 does not divide batch_size 24; 1 does, 5.2% slower: `bexp best {job_id} --divides`\n"
    )
    divides = bexp("best", job_id, "--divides")
    assert (divides.code, divides.stdout) == (0, "1\n")
    assert divides.stderr.startswith("warning: predicted in part; an exploration with `--micro-batch-size auto`")
    for options, code, size in ((("87",), 0, "4\n"), (("88",), 1, ""), (("72", "--divides"), 1, "")):
        enough = bexp("best", job_id, "--min-confidence", *options)
        assert (enough.code, enough.stdout) == (code, size)
    assert "micro_batch_size 1 has confidence 71, below --min-confidence 72" in enough.stderr


def test_best_prints_a_file_for_a_training_framework(bexp: Run, config: Path, worker: Worker) -> None:
    variant = ANSWER.variants[0].model_copy(update={"recommendation": UNDIVIDED})
    with worker(Answer(variants=(variant,))):
        job_id = bexp("submit", config, "--watch").stderr.split()[1]
    accelerate = bexp("best", job_id, "--format", "accelerate", "--min-confidence", "71")
    assert (accelerate.code, accelerate.stderr) == (0, "")
    assert accelerate.stdout.startswith(f"# bexp export 'accelerate' of exploration {job_id}: tiny\n")
    assert accelerate.stdout.endswith("\n")
    assert not accelerate.stdout.endswith("\n\n")
    assert "# batch_size 24 = micro_batch_size 1 x 24 accumulation steps x 1 data-parallel" in accelerate.stdout
    transformers = bexp("best", job_id, "--format", "transformers")
    assert json.loads(transformers.stdout)["gradient_accumulation_steps"] == 24
    assert "allocator: measured with PyTorch's default" in transformers.stderr
    assert bexp("best", job_id, "--format", "accelerate", "--min-confidence", "72").code == 1
    own = config.with_name("sft.yaml")
    own.write_text("base_model: a/b\nadapter: lora\nlora_r: 8\n")
    done = bexp("best", job_id, "--format", "axolotl", "--into", own)
    assert (done.code, done.stdout.splitlines()[:2]) == (0, ["base_model: a/b", "adapter: null"])
    assert "null, because it was not measured: adapter" in done.stderr
    unknown = bexp("best", job_id, "--format", "toml")
    assert (unknown.code, unknown.stdout) == (2, "")
    assert "the formats are python, transformers, trl, accelerate" in unknown.stderr
    assert bexp("best", job_id, "--format", "python", "--json").code == 2


def test_best_says_if_nothing_divides_the_batch(bexp: Run, config: Path, worker: Worker) -> None:
    none = without(UNDIVIDED, Role.DIVIDING, dividing_batch_sizes=(20, 28))
    with worker(Answer(variants=(ANSWER.variants[0].model_copy(update={"recommendation": none}),))):
        bexp("submit", config, "--watch")
    words = "no micro-batch that fits divides batch_size 24; the nearest batch sizes with one are 20 and 28\n"
    done = bexp("best", "latest")
    assert (done.code, done.stdout, done.stderr) == (0, "4\n", f"warning: {words}")
    divides = bexp("best", "latest", "--divides")
    assert (divides.code, divides.stdout, divides.stderr) == (1, "", f"bexp: {words}")


def test_an_exploration_is_found_by_the_beginning_of_its_id(bexp: Run, config: Path, queue: Queue) -> None:
    ids = [bexp("submit", config).stdout.strip() for _ in range(2)]
    assert f"exploration {ids[0]} is cancelled" in bexp("cancel", ids[0][:12]).stderr
    assert f"exploration {ids[1]} is cancelled" in bexp("cancel", "latest").stderr
    begin = f"made{ids[0]}"
    for end in "12":
        queue.request_cancel(queue.enqueue(REQUEST, job_id=begin + end)[0].id)
    several = bexp("best", begin)
    assert several.code == 2
    assert f"several explorations begin with '{begin}': {begin}2, {begin}1" in " ".join(several.stderr.split())
    too_short = bexp("best", "mad")
    assert (too_short.code, "several" in too_short.stderr) == (2, False)


def test_best_shows_what_real_runs_reached(bexp: Run, config: Path, worker: Worker, service: str) -> None:
    with worker():
        job_id = bexp("submit", config, "--watch").stderr.split()[1]
    report = RunReport.model_validate(RUN_REPORT["report"] | {"micro_batch_size": 4})
    with Client(service) as client:
        client.report_run(job_id, report)
        client.report_run(job_id, report.model_copy(update={"micro_batch_size": 3}))
    done = bexp("best", job_id)
    assert (done.code, done.stdout) == (0, "4\n")
    same, other = done.stderr.splitlines()
    assert same.startswith("a run on NVIDIA H100 80GB HBM3 reached 5,010 tokens/s per device with micro_batch_size 4")
    assert same.endswith("x the promised peak")
    assert "promised" not in other
    assert json.loads(bexp("best", job_id, "--json").stdout)["run_reports"][0] == report.model_dump(mode="json")


def test_submit_says_what_it_ignores(bexp: Run, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "target": "bexp", "use_mrope": False}))
    done = bexp("submit", path)
    assert (done.code, done.stderr) == (0, "ignored, because they change nothing: use_mrope\n")


def test_list_is_a_table_with_the_state(bexp: Run, config: Path, worker: Worker) -> None:
    with worker():
        bexp("submit", config, "--watch")
    waiting = bexp("submit", config).stdout.strip()
    rows = [row.split() for row in bexp("list", "--limit", "2").stdout.splitlines()]
    assert rows[0] == ["ID", "STATE", "MODEL", "MICRO_BATCH_SIZE", "CONFIDENCE", "CREATED"]
    assert rows[1][:5] == [waiting, "queued", "tiny", "-", "-"]
    assert rows[2][1:5] == ["succeeded", "tiny", "4", "87"]
    only = json.loads(bexp("list", "--state", "queued", "--json").stdout)
    assert {job["state"] for job in only} == {"queued"}


def test_cancel_ends_it_and_watch_says_so(bexp: Run, config: Path) -> None:
    job_id = bexp("submit", config).stdout.strip()
    done = bexp("cancel", job_id)
    assert (done.code, done.stdout) == (0, "")
    assert done.stderr == f"exploration {job_id} is cancelled\n"
    assert bexp("cancel", job_id).stderr == f"exploration {job_id} had ended before: cancelled\n"
    watched = bexp("watch", job_id)
    assert watched.code == 1
    assert "BEXP404" in watched.stdout


def test_ctrl_c_leaves_a_watched_job_alone(bexp: Run, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bexp.api.cli.jobs.follow", interrupted)
    done = bexp("submit", config, "--watch")
    assert done.code == 130
    assert "the exploration goes on; `bexp watch " in done.stderr
    assert json.loads(bexp("list", "--limit", "1", "--json").stdout)[0]["state"] == "queued"


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.FAILED])
def test_nothing_fits_is_exit_1_with_the_reason(bexp: Run, config: Path, worker: Worker, state: JobState) -> None:
    variant = VariantAnswer(num_query_groups=4, num_parameters=1, recommendation=None, reason="needs 9 GiB")
    with worker(Answer(variants=(variant,)), state, EventCode.NOTHING_FITS, "No recommendation: needs 9 GiB"):
        done = bexp("submit", config, "--watch")
    assert done.code == 1
    assert "No recommendation: needs 9 GiB" in done.stdout
    best = bexp("best", done.stderr.split()[1])
    assert (best.code, best.stdout, best.stderr) == (1, "", "bexp: no recommendation: needs 9 GiB\n")


def test_a_worker_that_failed_is_exit_3(bexp: Run, config: Path, worker: Worker) -> None:
    with worker(None, JobState.FAILED, EventCode.FAILED, "Exploration failed: no device"):
        done = bexp("submit", config, "--watch")
    assert done.code == 3
    assert done.stderr.endswith("bexp: Exploration failed: no device\n")
    assert bexp("best", done.stderr.split()[1]).code == 3


@pytest.mark.parametrize("command", ["watch", "best", "cancel"])
@pytest.mark.parametrize("job_id", ["0123456789abcdef", "../../etc/passwd", "é"])
def test_an_unknown_id_is_exit_2(bexp: Run, command: str, job_id: str) -> None:
    done = bexp(command, job_id)
    assert (done.code, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("bexp", ["service"], indirect=True)
def test_resume_goes_on_with_a_cancelled_exploration_where_a_service_answers(
    bexp: Run, config: Path, worker: Worker
) -> None:
    job_id = bexp("submit", config).stdout.strip()
    bexp("cancel", job_id)
    with worker():
        done = bexp("resume", job_id[:10])
    assert done.code == 0
    codes = re.findall(r"^BEXP(\d+)", done.stdout, re.MULTILINE)
    assert codes[:3] == ["101", "404", "101"]
    assert codes[-1] == "401"
    assert f"`bexp best {job_id} --json > best.json`" in " ".join(done.stdout.split())
    again = bexp("resume", job_id)
    assert (again.code, "has succeeded" in again.stderr) == (2, True)


def test_a_search_that_ended_below_its_target_is_provisional(bexp: Run, config: Path, worker: Worker) -> None:
    config.write_text(config.read_text().replace("confidence_target: 60", "confidence_target: 95"))
    with worker():
        done = bexp("submit", config, "--watch")
    said = "87 out of 100 that nothing is more than 1% faster. Provisional: 95 was asked for"
    assert said in " ".join(done.stdout.split())
    warned = bexp("best", done.stderr.split()[1])
    assert (warned.code, warned.stdout) == (0, "4\n")
    assert "warning: provisional: confidence 87 is below 95, which was asked for" in warned.stderr


@pytest.mark.parametrize("bexp", ["database"], indirect=True)
@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("queued", "cancelled", "is cancelled"),
        ("queued", "queued", "is being cancelled"),
        ("running", "running", "is being cancelled"),
        ("running", "failed", "had ended before: failed"),
        ("running", "succeeded", "had ended before: succeeded"),
        ("succeeded", "succeeded", "had ended before: succeeded"),
    ],
)
def test_a_cancel_says_what_has_become_of_it(
    bexp: Run, monkeypatch: pytest.MonkeyPatch, before: str, after: str, said: str
) -> None:
    jobs = {state: Exploration.model_validate(job_document(state)) for state in (before, after)}
    client = SimpleNamespace(get=lambda _: jobs[before], cancel=lambda _: jobs[after])
    monkeypatch.setattr("bexp.api.cli.jobs.connect", lambda: nullcontext(client))
    done = bexp("cancel", "job1")
    assert (done.code, done.stdout, done.stderr) == (0, "", f"exploration job1 {said}\n")
