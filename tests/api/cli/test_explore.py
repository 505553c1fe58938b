"""What `bexp explore`, `resume` and `submit` refuse before anything starts, and what a submission says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import sqlalchemy as sa

from bexp.api.cli import local_run
from bexp.api.cli.connection import shown_url
from bexp.api.cli.errors import CommandError
from bexp.api.cli.local_run import usable_device_counts
from bexp.api.cli.options import parse_micro_batch_size, read_request
from bexp.api.cli.submit import missing_target
from bexp.client.errors import ProblemError, ServiceError
from bexp.client.explorations import Exploration
from bexp.explorer.request.request import ExplorationRequest
from bexp.storage.jobs import JobState, get_job, list_jobs
from bexp.storage.queue import Queue
from bexp.storage.tables import workers
from bexp.storage.workers import register_worker
from tests.api.cli.conftest import Run
from tests.api.cli.samples import REQUEST, TINY, job_document
from tests.contracts.samples import make_worker

Refused = Callable[..., str]
in_the_database = pytest.mark.parametrize("bexp", ["database"], indirect=True)
SHARED = {"num_devices": 4, "context_parallel": {"sizes": [2]}}
"""Two devices share each sequence: a worker needs two, and can use all four."""


@pytest.fixture
def refused(bexp: Run, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Runs a command on a machine with two GPUs that does nothing but say why, and returns that."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")

    def run(*arguments: str | Path) -> str:
        before = list_jobs(queue.database), psutil.Process().children()
        done = bexp(*arguments)
        assert (done.code, done.stdout) == (2, "")
        assert (list_jobs(queue.database), psutil.Process().children()) == before
        return done.stderr

    return run


@in_the_database
@pytest.mark.parametrize(
    ("device", "complaint"),
    [
        ("cpu", "the exploration needs 2 devices, and --device cpu names 1"),
        ("cuda:1", "the exploration needs 2 devices, and --device cuda:1 names 1"),
        ("cuda:1-2", "device 'cuda:2' does not exist: 2 CUDA devices are visible"),
        ("cuda:0,cuda:9", "device 'cuda:9' does not exist"),
        ("cuda:0-7", "device 'cuda:7' does not exist"),
    ],
)
def test_devices_that_are_too_few_or_not_there(
    refused: Refused, configure: Callable[..., Path], device: str, complaint: str
) -> None:
    assert complaint in refused("explore", configure(**SHARED), "--device", device)


@in_the_database
def test_one_gpu_is_enough_where_nothing_is_shared(refused: Refused, configure: Callable[..., Path]) -> None:
    """It is refused for its number alone."""
    said = refused("explore", configure(num_devices=4), "--device", "cuda:2")
    assert "device 'cuda:2' does not exist: 2 CUDA devices are visible" in said
    assert "the exploration needs" not in said


@in_the_database
@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        ("train.py", "names no class: write it as train.py:Target"),
        ("train.py:", "names no class"),
        ("train.py:not-a-name", "names no class"),
        ("train.c:Target", "names no class"),
        ("train.txt:Target", "names no class"),
        ("other.py:Target", "there is no file other.py"),
        ("my-gpt", "there is no target 'my-gpt' here; there are bexp "),
        ("z-gpt", "there is no target 'z-gpt' here; there are bexp "),
        ("train.py:Target", "device 'cuda:5' does not exist"),  # the target is there, and the next thing is not
    ],
)
def test_a_target_that_is_not_there(
    refused: Refused, configure: Callable[..., Path], tmp_path: Path, target: str, complaint: str
) -> None:
    (tmp_path / "train.py").touch()
    assert complaint in refused("explore", configure({}), "--target", target, "--device", "cuda:5")


@in_the_database
def test_a_library_that_is_missing_is_named_with_the_way_to_install_it(
    refused: Refused, configure: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_run, "installed_targets", lambda: {"bexp": "0.1.0"})
    config = configure({"hf_config": {"model_type": "llama"}, "hf_seq_length": 64})
    assert "which is missing: pip install 'bexp[transformers]'" in refused("explore", config)


@in_the_database
@pytest.mark.parametrize(
    ("measured", "target", "said"),
    [
        ("local.train", None, "name its file as it was: --target train.py:NAME"),
        ("local.train", "mine", "--target train.py:NAME"),
        ("local.gpt", "train.py:Target", "--target gpt.py:NAME"),
        ("local", None, "--target FILE.py:NAME"),
        # The target is accepted in what follows, and the device is not.
        ("local.train", "train.py:Target", "device 'cuda:5' does not exist"),
        ("local", "train.py:Target", "device 'cuda:5' does not exist"),
        ("bexp", None, "device 'cuda:5' does not exist"),
    ],
)
def test_an_exploration_of_a_file_is_resumed_with_that_file(
    refused: Refused, queue: Queue, tmp_path: Path, measured: str, target: str | None, said: str
) -> None:
    (tmp_path / "train.py").touch()
    request = REQUEST if measured == "bexp" else ExplorationRequest.model_validate({"target": measured})
    job, _ = queue.enqueue(request)
    queue.request_cancel(job.id)
    chosen = () if target is None else ("--target", target)
    assert said in refused("resume", job.id, "--device", "cuda:5", *chosen)
    assert get_job(queue.database, job.id).state is JobState.CANCELLED


def test_a_field_that_is_set_has_a_value(bexp: Run, refused: Refused, configure: Callable[..., Path]) -> None:
    assert "--set 'tolerance= ' has no value" in refused("submit", configure(), "--set", "tolerance= ")
    assert "--set 'tolerance' is not of the form" in refused("submit", configure(), "--set", "tolerance")
    settings = ("--set", "memory_limit_gib=null", "--set", "budget.max_trials=1")
    request = json.loads(bexp("submit", configure(memory_limit_gib=3), *settings, "--json").stdout)["request"]
    assert (request["memory_limit_gib"], request["budget"]["max_trials"]) == (None, 1)


@pytest.mark.parametrize(
    ("name", "targets", "note"),
    [
        ("bexp", [], None),
        ("my-gpt", [], "no worker has the target 'my-gpt': "),
        (
            "my-gtp",
            [{"bexp": "1", "my-gpt": "2"}],
            r"target 'my-gtp' \(did you mean 'my-gpt'\?\): exploration .* waits",
        ),
        ("my-gpt", [{"bexp": "1"}, {"my-gpt": "2"}], None),
    ],
)
def test_a_submission_says_if_no_worker_has_its_target(
    bexp: Run, queue: Queue, configure: Callable[..., Path], name: str, targets: list[dict[str, str]], note: str | None
) -> None:
    """The id is printed whatever is said of the workers; a lost worker has no target."""
    for number, each in enumerate([{name: "1"}, *targets]):
        register_worker(queue.database, make_worker(f"h-{number}-cpu", targets=each))
    with queue.database.begin() as connection:
        hour_ago = queue.database.clock(-timedelta(hours=1))
        connection.execute(sa.update(workers).where(workers.c.id == "h-0-cpu").values(last_seen_at=hour_ago))
    done = bexp("submit", configure(None if name == "bexp" else {"target": name}))
    assert re.fullmatch(r"[0-9a-f]{16}\n", done.stdout)
    assert re.search(note, done.stderr) if note else done.stderr == ""


@pytest.mark.parametrize("error", [ProblemError(403, {"title": "Forbidden"}), ServiceError("it is away")])
def test_a_submission_says_nothing_of_workers_that_it_may_not_see(error: Exception) -> None:
    def workers() -> None:
        raise error

    queued, ended = (Exploration.model_validate(job_document(state)) for state in ("queued", "succeeded"))
    client: Any = SimpleNamespace(workers=workers)
    assert missing_target(client, queued, "my-gpt") is None
    client.workers = lambda: []
    assert missing_target(client, ended, "my-gpt") is None
    assert missing_target(client, queued, "my-gpt") is not None
    for state in ("idle", "lost", "measuring"):
        for reserved in (False, True):
            worker = SimpleNamespace(state=state, targets={"my-gpt": "1"}, reserved=reserved)
            client.workers = lambda: [worker]  # noqa: B023 - called at once
            assert (missing_target(client, queued, "my-gpt") is None) is (state != "lost" and not reserved)


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({"num_devices": 1}, (1,)),
        ({"num_devices": 2}, (1, 2)),
        ({"num_devices": 8}, (1, 8)),
        ({"num_devices": 8, "training": {"sharding": "explore"}}, (8,)),
        ({"num_devices": 8, "mode": "eval"}, (1,)),
        ({"num_devices": 4, "context_parallel": {"sizes": [2]}}, (2, 4)),
        ({"num_devices": 4, "context_parallel": {"sizes": [1, 4]}}, (4,)),
        ({"num_devices": 4, "context_parallel": {"sizes": [1, 2]}, "mode": "eval"}, (2,)),
        ({"num_devices": 4, "context_parallel": {"sizes": "explore"}}, (1, 2, 4)),
        ({"num_devices": 4, "context_parallel": {"sizes": "explore"}, "mode": "eval"}, (1, 2, 4)),
        (
            {"num_devices": 4, "context_parallel": {"sizes": "explore"}, "micro_batch_size": "auto", "batch_size": 2},
            (1, 2, 4),  # all four have too few sequences without sharing them, and one device does not
        ),
    ],
)
def test_a_worker_takes_as_many_devices_as_can_be_used(changes: dict[str, Any], counts: tuple[int, ...]) -> None:
    request = ExplorationRequest.model_validate(REQUEST.model_dump() | {"batch_size": 64} | changes)
    assert usable_device_counts(request) == counts


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sqlite:////data/bexp.db", "/data/bexp.db"),
        ("postgresql://me:se@cret@host/name", "postgresql://host/name"),
        ("postgresql://host/name", "postgresql://host/name"),
        ("postgresql://host/name?user=me&password=se@cret", "postgresql://..."),
        ("postgresql://host/name?user=me&password=secret", "postgresql://host/name"),
        ("postgresql://me:se?cret@host/name", "postgresql://..."),
    ],
)
def test_a_password_is_not_shown(url: str, shown: str) -> None:
    assert shown_url(url) == shown


@pytest.mark.parametrize("device", ["cuda:1", "cuda:0-3", "cpu,cpu", "replay:table.jsonl"])
def test_a_submission_names_no_devices_of_one_machine(
    refused: Refused, configure: Callable[..., Path], device: str
) -> None:
    said = f"--device {device} is of one machine, and any worker may take what is submitted: give cpu or cuda"
    assert said in refused("submit", configure(), "--device", device)


@pytest.mark.parametrize("bexp", ["service"], indirect=True)
@pytest.mark.parametrize("given", [("--device", "cpu"), ("--target", "train.py:Target")])
def test_workers_of_a_service_resume_on_no_device_of_this_machine(refused: Refused, given: tuple[str, str]) -> None:
    assert "the workers of BEXP_API_URL continue it" in refused("resume", "latest", *given)


@pytest.mark.parametrize("text", ["", "all", "1.5", "-4", "2-", "2-x", "x-4", "2-4-8", "2,", "2,x", "two"])
def test_what_is_no_micro_batch_size_is_refused_with_what_is(text: str) -> None:
    said = "is neither explore, auto, MIN-MAX, a number, nor a list such as 2,4,8"
    with pytest.raises(CommandError, match=said) as refused:
        parse_micro_batch_size(text)
    assert refused.value.code == 2


def test_a_model_without_a_name_is_called_by_its_file(tmp_path: Path) -> None:
    model = {key: value for key, value in TINY["model"].items() if key != "name"}
    for file, name in (("my-run.yaml", "my-run"), ("-(x)y.yaml", "x-y"), ("config.json", "config")):
        (tmp_path / file).write_text(json.dumps({"model": model}))
        assert read_request(tmp_path / file, {}).explored.name == name
    (tmp_path / "named.yaml").write_text(json.dumps(TINY))
    assert read_request(tmp_path / "named.yaml", {}).explored.name == TINY["model"]["name"]
