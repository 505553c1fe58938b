"""Rows that ranks measure together, and the summaries of contenders."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from benchmarks import expert_sharding, long_contexts
from benchmarks.rank_runs import UNFINISHED, Rows, slowest_seconds

CPU = torch.device("cpu")


@pytest.fixture
def _alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def fail() -> dict[str, Any]:
    raise ValueError("no kernel")


@pytest.mark.usefixtures("_alone")
def test_each_row_is_written_and_measured_once_even_if_it_fails(tmp_path: Path) -> None:
    path, calls = tmp_path / "rows.json", []

    def measure() -> dict[str, Any]:
        rows = json.loads(path.read_text())["rows"]
        assert rows[-1] == {"name": "a", "error": UNFINISHED}, "it is there if this ends the process"
        calls.append(slowest_seconds(lambda: None, CPU))
        return {"seconds": calls[-1]}

    for _ in range(2):  # a second start
        rows = Rows(path, CPU, 100.0, len, commit="c")
        assert rows.measure(measure, name="a")["seconds"] == calls[0]
        rows.measure(fail, name="b")
    assert Rows(path, CPU, 0.0, len).measure(measure, name="too late") == {}
    found = json.loads(path.read_text())
    assert found["rows"] == [{"name": "a", "seconds": calls[0]}, {"name": "b", "error": "ValueError: no kernel"}]
    assert (found["summary"], found["commit"], len(calls)) == (2, "c", 1)


@pytest.mark.usefixtures("_alone")
def test_a_rank_that_fails_while_others_wait_writes_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    rows = Rows(path, CPU, 100.0, len)

    with monkeypatch.context() as patched:

        def nobody_answers(*_: object, **__: object) -> None:
            patched.setattr(dist, "get_rank", lambda: 3)
            raise RuntimeError("timed out")

        patched.setattr(dist, "all_gather_object", nobody_answers)
        with pytest.raises(RuntimeError, match="timed out"):
            rows.measure(fail, name="b")
    assert json.loads(path.read_text())["rows"] == [{"name": "b", "error": "ValueError: no kernel"}]


def test_turns_are_summarised_next_to_the_best_of_torch() -> None:
    row: partial[dict[str, Any]] = partial(dict, seq_length=8, peak_bytes=4)
    rows = [
        row(contender="zigzag", tokens_per_second=30.0),
        row(contender="zigzag", tokens_per_second=36.0, peak_bytes=5),
        row(contender="torch by all-gather", tokens_per_second=20.0),
        row(contender="torch by all-to-all", tokens_per_second=22.0),
        row(contender="ring", error="out of memory"),
        {"contender": "alone", "gradient_error": 1e-3},
    ]
    found = {row["contender"]: row for row in long_contexts.summarize(rows)}
    assert found.keys() == {"zigzag", "torch by all-gather", "torch by all-to-all"}
    zigzag = found["zigzag"]
    assert (zigzag["tokens_per_second"], zigzag["peak_bytes"]) == (33.0, 5)
    assert (zigzag["spread"], zigzag["over_torch"]) == pytest.approx((6 / 33, 1.5))


def test_contenders_that_are_wrong_are_not_timed() -> None:
    repeated = f"torch{long_contexts.REPEATED}"
    assert long_contexts.choose({"torch": 0.01, repeated: 0.01, "ring": 0.2}) == ["torch"]
    assert long_contexts.choose({"torch": 0.5, repeated: 0.01, "ring": None}) == [repeated]


def test_mixtures_are_summarised_next_to_plain_sharding() -> None:
    row: partial[dict[str, Any]] = partial(dict, model="m", size=4)
    rows = [
        row(contender="experts apart", tokens_per_second=15.0, peak_bytes=6, loss=2.5),
        row(contender="sharded", tokens_per_second=10.0, peak_bytes=8, loss=2.0),
        row(contender="sharded, set up", error="out of memory"),
        row(contender="sharded", size=8, error="out of memory"),
        row(contender="experts apart", size=8, tokens_per_second=20.0, peak_bytes=9, loss=2.5),
    ]
    assert expert_sharding.summarize(rows) == [
        {"model": "m", "size": 4, "contender": "experts apart", "speed": 1.5, "peak": 0.75, "loss": 0.5},
        {"model": "m", "size": 4, "contender": "sharded", "speed": 1.0, "peak": 1.0, "loss": 0.0},
    ]
