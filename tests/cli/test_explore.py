"""What `bexp explore` and `bexp submit` do beside following their job."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import sqlalchemy as sa
import yaml
from typer.testing import CliRunner

from bexp.api.cli import app, explore, local_run, resume
from bexp.api.cli.connection import shown_url
from bexp.api.cli.errors import CommandError
from bexp.api.cli.options import parse_fields, read_request, split_target
from bexp.explorer.spec.request import ExplorationRequest
from bexp.storage.queue import Queue
from bexp.storage.tables import workers
from bexp.storage.workers import register_worker
from tests.cli.conftest import Run
from tests.cli.samples import REQUEST, TINY
from tests.contracts.samples import make_worker


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
    ],
)
def test_a_worker_takes_as_many_devices_as_can_be_used(changes: dict[str, Any], counts: tuple[int, ...]) -> None:
    request = ExplorationRequest.model_validate(REQUEST.model_dump() | {"batch_size": 64} | changes)
    assert local_run.usable_device_counts(request) == counts


@pytest.mark.parametrize(
    ("device", "needed", "enough"),
    [("cpu", 2, False), ("cpu,cpu", 2, True), ("cuda:0-2", 4, False), ("cuda:0-3", 4, True), (None, 8, True)],
)
def test_too_few_named_devices_are_refused_before_anything_starts(
    device: str | None, needed: int, enough: bool
) -> None:
    expected = nullcontext() if enough else pytest.raises(CommandError, match=f"needs {needed} devices")
    with expected:
        local_run._check_number_of_devices(device, needed)


@pytest.mark.parametrize(
    ("device", "missing"),
    [
        *((None, None), ("cpu", None), ("cpu,cpu", None), ("replay:cuda.jsonl", None)),
        *(("cuda", None), ("cuda:0-1", None), ("cuda:0, cuda:1", None)),
        *(("cuda:2", "cuda:2"), ("cuda:0-7", "cuda:7"), ("cuda:0,cuda:9", "cuda:9")),
    ],
)
def test_a_gpu_that_is_not_there_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, device: str | None, missing: str | None
) -> None:
    monkeypatch.setattr("bexp.measure.visible_gpus._gpu_uuids", lambda: ["GPU-a", "GPU-b"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    told = f"device '{missing}' does not exist: 2 CUDA devices are visible"
    with pytest.raises(CommandError, match=told) if missing else nullcontext():
        local_run._check_devices(device)


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
    bexp: Run, queue: Queue, tmp_path: Path, name: str, targets: list[dict[str, str]], note: str | None
) -> None:
    """The id is printed whatever is said of the workers; a lost worker has no target."""
    with queue.database.begin() as connection:
        connection.execute(sa.delete(workers))
    for number, each in enumerate([{name: "1"}, *targets]):
        register_worker(queue.database, make_worker(f"h-{number}-cpu", targets=each))
    with queue.database.begin() as connection:
        hour_ago = queue.database.clock(-timedelta(hours=1))
        connection.execute(sa.update(workers).where(workers.c.id == "h-0-cpu").values(last_seen_at=hour_ago))
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(TINY if name == "bexp" else {"target": name}))
    done = bexp("submit", config)
    assert re.fullmatch(r"[0-9a-f]{16}\n", done.stdout)
    assert re.search(note, done.stderr) if note else done.stderr == ""
    bexp("cancel", done.stdout.strip())
    with queue.database.begin() as connection:
        connection.execute(sa.delete(workers))


@pytest.mark.parametrize(
    ("measured", "target", "hint"),
    [
        *(("bexp", None, None), ("local.train", "train.py:Target", None), ("local", "train.py:Target", None)),
        ("local.train", None, "--target train.py:NAME"),
        ("local.train", "mine", "--target train.py:NAME"),
        ("local.gpt", "train.py:Target", "--target gpt.py:NAME"),
        ("local", None, "--target FILE.py:NAME"),
    ],
)
def test_an_exploration_of_a_file_is_resumed_with_that_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: str, target: str | None, hint: str | None
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    request = REQUEST.model_copy(update={"target": measured, "model": None})
    with pytest.raises(CommandError, match=hint) if hint else nullcontext():
        resume.check_target(request, target)


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


def test_a_field_that_is_set_has_a_value() -> None:
    assert parse_fields(["a=null", "b=''", "c.d=1"]) == {"a": None, "b": "", "c.d": 1}
    with pytest.raises(CommandError, match=r"--set 'tolerance= ' has no value"):
        parse_fields(["tolerance= "])


def test_a_target_may_be_a_class_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    assert split_target("train.py:Target") == ("local.train", f"{tmp_path / 'train.py'}:Target")
    assert split_target("transformers") == ("transformers", None)
    assert split_target(None) == (None, None)


@pytest.mark.parametrize(
    ("target", "complaint"),
    [("train.py", "names no class"), ("train.py:", "names no class"), ("other.py:Target", "there is no file other.py")],
)
def test_a_target_that_names_no_class_of_a_file_is_refused(target: str, complaint: str) -> None:
    with pytest.raises(CommandError, match=complaint):
        split_target(target)


def test_a_target_that_this_machine_lacks_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explore, "installed_targets", lambda: {"bexp": "0.1.0"})
    explore.check_target(REQUEST, None)
    of_library = ExplorationRequest.model_validate({"hf_config": {"model_type": "llama"}, "hf_seq_length": 64})
    with pytest.raises(CommandError, match=r"which is missing: pip install 'bexp\[transformers\]'"):
        explore.check_target(of_library, "cpu")
    explore.check_target(of_library, "replay:table.jsonl")
    with pytest.raises(CommandError, match=r"there is no target 'my-gpt' here; there are bexp 0\.1\.0"):
        explore.check_target(ExplorationRequest.model_validate({"target": "my-gpt"}), None)


@pytest.mark.parametrize(
    ("text", "options", "log_dir"),
    [
        ("{}", [], None),
        ("{}", ["--log-dir", "logs"], Path("logs")),
        ("{runconfig: {use_cs_grad_accum: true}, train_input: {batch_size: 8}}", [], Path.cwd),
        ("{trainer: {}}", ["--log-dir", "logs"], Path("logs")),
    ],
)
def test_a_log_file_is_written_for_cerebras_yaml_and_where_it_is_asked_for(
    text: str, options: list[str], log_dir: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my-run.yaml").write_text(text)
    run, request = MagicMock(), REQUEST
    run.return_value.__enter__.return_value.follow.return_value = 0
    monkeypatch.setattr("bexp.api.cli.explore.LocalRun", run)
    monkeypatch.setattr("bexp.api.cli.explore.open_stored", MagicMock())
    monkeypatch.setattr("bexp.api.cli.options.parse_request", lambda *_, **__: request)
    assert CliRunner().invoke(app, ["explore", str(tmp_path / "my-run.yaml"), *options]).exit_code == 0
    (asked,) = run.return_value.__enter__.return_value.follow.call_args_list
    assert asked.kwargs["log_dir"] == (log_dir() if callable(log_dir) else log_dir)


def test_a_model_without_a_name_is_called_by_its_file(tmp_path: Path) -> None:
    model = {key: value for key, value in TINY["model"].items() if key != "name"}
    for file, name in (("my-run.yaml", "my-run"), ("-(x)y.yaml", "x-y"), ("config.json", "config")):
        (tmp_path / file).write_text(json.dumps({"model": model}))
        assert read_request(tmp_path / file, {}).explored.name == name
    (tmp_path / "named.yaml").write_text(json.dumps(TINY))
    assert read_request(tmp_path / "named.yaml", {}).explored.name == TINY["model"]["name"]
