from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks.docs.results import load
from benchmarks.environment import write_results
from benchmarks.gemm_cases import OTHERS, PAIR, TELLING
from benchmarks.gemm_contenders import BASELINES, CHOSEN, OURS
from benchmarks.gemm_runs import Run, device_hardware
from benchmarks.isolation import Isolated, Lost
from benchmarks.variable_gemm import DTYPES, LIMIT_BYTES, main, remaining, summary, tasks


def _row(contender: str, training: str, forward: str = "ok", case: str = "a", **more: Any) -> dict[str, Any]:
    key = {"case": case, "dtype": "bfloat16", "limit_bytes": None, "contender": contender}
    return key | {"training": {"outcome": training} | more, "forward": {"outcome": forward}}


def test_summary_asks_whether_one_of_ours_passes() -> None:
    found = {
        "contenders": {"baselines": ["bmm"], "ours": ["x", "y"]},
        "runs": [
            *[_row("bmm", "out_of_memory"), _row("x", "wrong", "wrong"), _row("y", "ok")],
            *[_row("bmm", "ok", case="b"), _row("x", "wrong", case="b"), _row("y", "unsupported", case="b")],
            *[_row(name, "operands_exceed_limit", case="c") for name in ("bmm", "x", "y")],
            _row("bmm", "ok", case="d"),  # ours were left out
        ],
    }
    result = summary(found)
    assert result["training"]["cells"] == 2
    assert result["training"]["cells_larger_than_the_limit"] == 1
    assert result["training"]["cells_passed_by_ours"] == 1
    assert [row["case"] for row in result["training"]["cells_not_passed_by_ours"]] == ["b"]
    assert [row["case"] for row in result["training"]["out_of_memory"]] == ["a"]
    assert result["training"]["outcomes"]["bmm"] == {"out_of_memory": 1, "ok": 1}
    assert result["forward"]["cells"] == result["forward"]["cells_passed_by_ours"] == 3


def test_a_cell_counts_once_ours_and_bmm_are_there() -> None:
    found = {
        "contenders": {"baselines": ["loop", "bmm"], "ours": ["x"]},
        "runs": [_row("bmm", "ok"), _row("x", "ok"), _row("loop", "ok", case="b"), _row("x", "ok", case="b")],
    }
    result = summary(found)["training"]
    assert result["cells"] == 1
    assert result["outcomes"] == {"loop": {"left_out": 1}, "bmm": {"ok": 1}, "x": {"ok": 1}}


@pytest.mark.parametrize(
    ("evens", "unevens", "verdict"),
    [((2.0, 2.2), (1.0, 1.2), "faster"), ((2.0, 2.2), (2.1, 1.0), "level"), ((2.0, 2.2), (2.3, 2.4), "slower")],
)
def test_uneven_is_faster_if_both_times_are(evens: Any, unevens: Any, verdict: str) -> None:
    even, uneven = (case.name for case in PAIR)
    rows = [_row("x", "ok", case=even, seconds=seconds) for seconds in evens]
    rows += [_row("x", "ok", case=uneven, seconds=seconds) for seconds in unevens]
    (found,) = summary({"contenders": {"baselines": [], "ours": ["x"]}, "runs": rows})["uneven_over_even"]
    assert found["verdict"] == verdict
    assert found["of"] == "training"


def test_all_contenders_meet_all_cases_with_and_without_the_limit() -> None:
    found = [task for group in tasks(quick=False, limited=True) for task in group]
    for name in (*BASELINES, *OURS):
        cells = [cell for cell, contender in found if contender == name]
        for case in (*TELLING, *OTHERS):
            for dtype in DTYPES:
                limits = [cell.limit_bytes for cell in cells if (cell.case, cell.dtype) == (case, dtype)]
                assert sorted(limits, key=str) == [LIMIT_BYTES, None]
    assert {cell.limit_bytes for group in tasks(quick=False, limited=False) for cell, _ in group} == {None}


def test_ours_and_bmm_meet_every_case_before_anything_else() -> None:
    groups = list(tasks(quick=False, limited=True))
    first = [group[0] for group in groups[: next(i for i, group in enumerate(groups) if len(group) > 1)]]
    assert {name for _, name in first} == {"bmm", *OURS, *CHOSEN}
    cases = [(cell.case, cell.dtype, cell.limit_bytes) for cell, name in first if name == "bmm"]
    wanted = {(case, dtype, limit) for case in (*TELLING, *OTHERS) for dtype in DTYPES for limit in (None, LIMIT_BYTES)}
    assert wanted <= set(cases)
    assert len(first) == len(set(first))
    rest = [task for group in groups for task in group if task not in first]
    everyone = {*BASELINES, *OURS, *CHOSEN}
    assert {name for _, name in rest[: 4 * len(DTYPES) * len(everyone)]} == everyone, "then the comparisons"
    assert {name for _, name in rest[4 * len(DTYPES) * len(everyone) :]} == {"loop", "grouped_mm"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_table_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "table.json"
    arguments = ["--device", "cpu", "--shrink", "65536", "--quick", "--seconds", "1800", "--out", str(out)]
    assert main(arguments) == 0
    found = json.loads(out.read_text())
    assert not found["left_out"]
    assert found["hardware"]["device_kind"] == "cpu"
    assert found["summary"]["training"]["outcomes"]["loop"] == {"ok": 5}
    assert "uneven / even bfloat16 loop training" in capsys.readouterr().out


class Stub(Isolated):
    """A device on which everything hangs."""

    calls: ClassVar[list[Run]] = []
    hardware: ClassVar[dict[str, Any]] = {"device_kind": "cpu", "device_name": "a", "context_bytes": 0}

    def call(self, function: Callable[..., Any], *arguments: Any, seconds: float) -> Any:
        if function is device_hardware:
            return self.hardware
        self.calls.append(arguments[0])
        return Lost(True, "no result within 60 s")


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> type[Stub]:
    monkeypatch.setattr("benchmarks.variable_gemm.Isolated", Stub)
    monkeypatch.setattr(Stub, "calls", [])
    return Stub


@pytest.mark.usefixtures("stub")
def test_what_there_is_no_time_for_is_named(tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    assert main(["--out", str(out), "--device", "cpu", "--quick", "--seconds", "1e-9"]) == 0
    found = json.loads(out.read_text())
    assert not found["runs"]
    assert {row["contender"] for row in found["left_out"]} == {*BASELINES, *OURS, *CHOSEN}

    assert main(["--out", str(out), "--device", "cpu", "--quick"]) == 1
    found = json.loads(out.read_text())
    assert not found["left_out"]
    assert found["runs"][0]["training"] == {"outcome": "timed_out", "reason": "no result within 60 s"}
    assert found["summary"]["training"]["cells_passed_by_ours"] == 0


def test_a_run_that_was_cut_short_is_completed(
    tmp_path: Path, stub: type[Stub], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "table.json"
    arguments = ["--out", str(out), "--device", "cpu", "--quick"]
    main(arguments)
    whole = json.loads(out.read_text())
    lost = [row for row in whole["runs"] if row["contender"] == "loop"]
    gone = next(row for row in whole["runs"] if (row["case"], row["contender"]) == (PAIR[0].name, "bmm"))
    kept = [row | {"mark": "kept"} for row in whole["runs"] if row not in lost and row is not gone]
    short = whole | {"runs": kept, "context_bytes": 7}
    del short["options"]  # as an earlier version left it
    out.write_text(json.dumps(short))
    stub.calls.clear()
    monkeypatch.setattr(stub, "hardware", stub.hardware | {"context_bytes": 9})
    main(arguments)
    found = json.loads(out.read_text())
    names = [task.contender for task in stub.calls]
    assert sorted(set(names)) == ["bmm", "loop"]
    assert [task.case.load for task in stub.calls if task.contender == "bmm"] == ["even", "uneven", "uneven", "even"]
    assert {task.context_bytes for task in stub.calls} == {7}, "the limit of the runs that are kept"
    assert len(found["runs"]) == len(whole["runs"])
    assert sum("mark" not in row for row in found["runs"]) == len(stub.calls) == len(lost) + 4
    assert not found["left_out"]
    assert len(found["continued"]) == 1
    assert found["options"]["quick"]
    assert "and 3 of incomplete comparisons are repeated" in capsys.readouterr().out

    stub.calls.clear()
    before = out.read_text()
    main(arguments)
    assert not stub.calls
    assert out.read_text() == before


def test_a_command_that_is_killed_has_named_what_it_had_not_done(tmp_path: Path, stub: type[Stub]) -> None:
    out = tmp_path / "table.json"
    arguments = ["--out", str(out), "--device", "cpu", "--quick"]
    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(stub, "call", _until(stub, 3))
        main(arguments)
    found = json.loads(out.read_text())
    assert len(found["runs"]) == 3
    main(arguments)
    assert len(json.loads(out.read_text())["runs"]) == 3 + len(found["left_out"])


def _until(stub: type[Stub], last: int) -> Callable[..., Any]:
    good = stub.call

    def call(self: Stub, *arguments: Any, seconds: float) -> Any:
        if len(self.calls) == last:
            raise KeyboardInterrupt
        return good(self, *arguments, seconds=seconds)

    return call


@pytest.mark.parametrize(
    ("changes", "hardware", "reason"),
    [
        (["--shrink", "2"], {}, "options.shrink 1 instead of 2"),
        ([], {"device_name": "b"}, 'hardware.device_name "a" instead of "b"'),
    ],
)
def test_another_run_is_refused(
    tmp_path: Path,
    stub: type[Stub],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    changes: list[str],
    hardware: dict[str, Any],
    reason: str,
) -> None:
    out = tmp_path / "table.json"
    arguments = ["--out", str(out), "--device", "cpu", "--quick", "--seconds", "1e-9"]
    main(arguments)
    monkeypatch.setattr(stub, "hardware", stub.hardware | hardware)
    before = out.read_text()
    with pytest.raises(SystemExit):
        main([*arguments, *changes])
    assert reason in capsys.readouterr().err
    assert out.read_text() == before


def test_the_recorded_table_can_be_continued(
    tmp_path: Path, stub: type[Stub], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = load("h200-variable-gemm")
    out = tmp_path / "table.json"
    write_results(out, recorded)
    monkeypatch.setattr(stub, "hardware", recorded["hardware"])
    monkeypatch.setattr("benchmarks.variable_gemm.describe_environment", lambda: recorded["environment"])
    monkeypatch.setattr("benchmarks.variable_gemm.kernels_digest", lambda: recorded.get("kernels"))
    assert main(["--out", str(out), "--seconds", "1e-9"]) == 0
    assert not stub.calls
    todo, kept = remaining(list(tasks(quick=False, limited=True)), recorded["runs"])
    assert f"{len(kept)} runs are kept" in capsys.readouterr().out
    assert not recorded["left_out"]
    assert {name for group in todo for _, name in group} == {*CHOSEN}, "which came later"
    assert json.loads(out.read_text()) == recorded
