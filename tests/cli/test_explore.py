"""What `bexp explore` does beside following its job."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from api.cli import explore
from api.cli.connection import shown_url
from api.cli.errors import CommandError
from api.cli.options import split_target
from explorer.spec.request import ExplorationRequest
from tests.cli.samples import REQUEST


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
    assert explore.usable_device_counts(request) == counts


@pytest.mark.parametrize(
    ("device", "needed", "enough"),
    [("cpu", 2, False), ("cpu,cpu", 2, True), ("cuda:0-2", 4, False), ("cuda:0-3", 4, True), (None, 8, True)],
)
def test_too_few_named_devices_are_refused_before_anything_starts(
    device: str | None, needed: int, enough: bool
) -> None:
    expected = nullcontext() if enough else pytest.raises(CommandError, match=f"needs {needed} devices")
    with expected:
        explore._check_number_of_devices(device, needed)


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


def test_a_target_may_be_a_class_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    assert split_target("train.py:Target") == ("local", f"{tmp_path / 'train.py'}:Target")
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
