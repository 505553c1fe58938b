"""The command that refreshes recorded GPU results, on fake results with real child processes."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import published_plans
from benchmarks.refresh import run as runs
from benchmarks.refresh.__main__ import main
from benchmarks.refresh.build import run_each
from benchmarks.refresh.catalogue import PUBLISHED, catalogue
from benchmarks.refresh.result import Recorded, Results, State, Step, in_order
from benchmarks.refresh.run import Refresh, build, run_child
from benchmarks.refresh.waiting import VARIANTS
from bexp.explorer.formats.request import parse_request
from bexp.kernels.experts.auto.digest import kernels_digest

WRITER = """
import json, os, pathlib, signal, sys, time
out, digest, rows, then = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(","), sys.argv[4]
found = json.loads(out.read_text()) if out.exists() else {"kernels": digest, "rows": []}
for row in rows:
    found["rows"].append(row)
    out.write_text(json.dumps(found))
found["device"] = os.environ.get("CUDA_VISIBLE_DEVICES")
out.write_text(json.dumps(found))
if then == "ignore":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
if then in ("hang", "ignore"):
    time.sleep(60)
sys.exit(3 if then == "fail" else 0)
"""
ROWS = ("a", "b", "c")


def fake(name: str, writes: int = 3, then: str = "end", **changes: Any) -> Recorded:
    """A result whose command writes so many of the missing rows, and then ends, hangs or fails."""

    def command(step: Step) -> list[str]:
        rows = ",".join(step.missing[:writes])
        return [sys.executable, "-S", "-c", WRITER, str(step.out), kernels_digest(), rows, then]

    plain = Recorded(name, f"{name}.json", ROWS, _rows, command, row_seconds=1, start_seconds=0.1)
    return replace(plain, **changes)


def _rows(found: Results) -> list[str]:
    return list(found["rows"])


def _write(folder: Path, name: str, rows: str, kernels: str | None = None) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"kernels": kernels or kernels_digest(), "rows": list(rows)}))


def _read(folder: Path, name: str) -> Results:
    found: Results = json.loads((folder / f"{name}.json").read_text())
    return found


@pytest.fixture
def refresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Refresh]:
    monkeypatch.setattr(runs, "STOP_SECONDS", 0.5)

    def begin(seconds: float = 30.0, devices: str = "cpu") -> Refresh:
        return Refresh(tmp_path, tmp_path / "drafts", time.monotonic() + seconds, devices.split(","))

    return begin


@pytest.mark.parametrize(
    ("recorded", "draft", "missing", "replaced"),
    [
        (None, None, "abc", False),
        (("ab", "old"), None, "abc", False),
        (("ab", None), None, "c", False),
        (("ab", "old"), ("a", None), "bc", False),
        (("ab", "old"), ("ab", None), "c", True),
        (("ab", "old"), ("abc", "old"), "abc", False),
        (("ab", None), ("ab", None), "c", False),
        (("ab", None), ("abc", None), "", True),
        (None, ("a", None), "bc", True),
    ],
)
def test_rows_of_earlier_kernels_are_missing_and_a_draft_replaces_no_longer_file(
    tmp_path: Path, recorded: tuple[str, str] | None, draft: tuple[str, str] | None, missing: str, replaced: bool
) -> None:
    for folder, what in ((tmp_path, recorded), (tmp_path / "drafts", draft)):
        if what is not None:
            _write(folder, "x", *what)
    state = fake("x").state(tmp_path, tmp_path / "drafts")
    assert "".join(state.missing) == missing
    assert state.is_replaced is replaced


def test_what_is_worth_most_for_its_seconds_comes_first_and_what_cannot_begin_is_left_out() -> None:
    cheap = fake("cheap", value=2, row_seconds=1)
    dear = fake("dear", value=20, row_seconds=5)
    slow = fake("slow", value=1000, row_seconds=100)
    done = State(fake("done"), {"kernels": kernels_digest(), "rows": list(ROWS)}, None)
    states = [State(each, None, None) for each in (cheap, slow, dear)]
    assert [each.result.name for each in in_order([*states, done], 60)] == ["dear", "cheap"]
    assert [each.result.name for each in in_order(states, 2)] == ["cheap"]


def test_a_child_that_fails_or_hangs_is_reported_and_the_rest_goes_on(
    tmp_path: Path, refresh: Callable[..., Refresh], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "LATE", 0.5)
    missing = fake("missing", command=lambda step: ["/no/such/command"], value=9)
    broken = fake("broken", command=lambda step: [step.nothing], value=8)
    hangs = fake("hangs", writes=1, then="hang", value=7)
    fails, good = fake("fails", writes=2, then="fail", value=6), fake("good", value=5)
    _write(tmp_path, "fails", "abc", "old")
    run = refresh()
    run.run([good, fails, hangs, broken, missing])
    assert run.notes["good"] == "ended" and run.notes["fails"] == "status 3" and run.notes["hangs"] == "out of time"
    assert "No such file" in run.notes["missing"] and run.notes["broken"].startswith("AttributeError")
    assert _read(tmp_path, "good")["rows"] == [*ROWS]
    assert _read(tmp_path, "hangs")["rows"] == ["a"], "what it wrote before it hung is kept"
    assert _read(tmp_path, "fails")["kernels"] == "old", "a longer table is not replaced by a shorter one"
    assert _read(tmp_path / "drafts", "fails")["rows"] == ["a", "b"]


def test_a_later_run_continues_the_draft_and_then_replaces_the_file(
    tmp_path: Path, refresh: Callable[..., Refresh]
) -> None:
    _write(tmp_path, "x", "abc", "old")
    _write(tmp_path / "drafts", "x", "a")
    refresh().run([fake("x", writes=2)])
    assert _read(tmp_path, "x")["rows"] == [*ROWS]
    assert _read(tmp_path, "x")["kernels"] == kernels_digest()


def test_a_summary_is_written_from_a_result_that_was_replaced(tmp_path: Path, refresh: Callable[..., Refresh]) -> None:
    code = "import json, sys; print(len(json.load(open(sys.argv[1]))['rows']))"
    good = fake("good", summary="sum.json", summarize=lambda path: [sys.executable, "-S", "-c", code, str(path)])
    bad = fake("bad", summary="bad-sum.json", summarize=lambda path: [sys.executable, "-S", "-c", "print('oh')"])
    run = refresh()
    run.run([good, bad])
    assert json.loads((tmp_path / "sum.json").read_text()) == len(ROWS)
    assert run.notes["bad"].endswith("no JSON") and not (tmp_path / "bad-sum.json").exists()


def test_a_draft_of_earlier_kernels_is_not_continued(tmp_path: Path, refresh: Callable[..., Refresh]) -> None:
    _write(tmp_path / "drafts", "x", "ab", "old")
    refresh().run([fake("x")])
    assert _read(tmp_path, "x")["rows"] == [*ROWS] and _read(tmp_path, "x")["kernels"] == kernels_digest()


def test_the_end_is_honoured(tmp_path: Path, refresh: Callable[..., Refresh], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "STOP_SECONDS", 1.0)
    started = time.monotonic()
    run = refresh(3.5)
    run.run([fake(name, writes=1, then="ignore", value=value) for name, value in (("first", 2), ("second", 1))])
    assert time.monotonic() - started < 4.2, "a child that ignores the interrupt is killed by the end"
    assert run.notes["first"] == "out of time"
    assert not (tmp_path / "second.json").exists()


def test_devices_work_side_by_side_and_a_result_of_several_gets_all(
    tmp_path: Path, refresh: Callable[..., Refresh]
) -> None:
    both = fake("both", num_devices=2)
    refresh(devices="cuda:2,cuda:5").run([fake("a"), fake("b"), both])
    assert {_read(tmp_path, name)["device"] for name in "ab"} <= {"2", "5"}
    assert _read(tmp_path, "both")["device"] == "2,5"
    (tmp_path / "both.json").unlink()
    one = refresh(devices="cuda:0")
    one.run([both])
    assert "both" not in one.notes, "it needs two devices"


def test_builds_run_in_as_many_processes_as_there_are_cores_and_a_failure_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    wait = "import pathlib, sys, time; p = pathlib.Path(sys.argv[1]); (p / sys.argv[2]).touch()\n"
    wait += "while len(list(p.iterdir())) < 4: time.sleep(0.02)"  # ends only if all four are there at a time
    commands = tuple((sys.executable, "-S", "-c", wait, str(tmp_path), str(number)) for number in range(4))
    assert build([State(fake("x", builds=commands), None, None)], 30) == []
    bad = (sys.executable, "-S", "-c", "raise SystemExit(4)")
    (said,) = build([State(fake("x", large_builds=(bad, bad)), None, None)], 30)
    assert said.endswith("status 4")


def test_a_size_that_cannot_be_built_does_not_end_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    built = []
    assert run_each({"bad": lambda: 1 / 0, "good": lambda: built.append("good")}) == 1  # type: ignore[dict-item]
    assert built == ["good"] and "bad: ZeroDivisionError" in capsys.readouterr().err


def test_the_children_of_a_child_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "STOP_SECONDS", 0.2)
    code = "import subprocess, sys, pathlib; p = subprocess.Popen(['sleep', '60'])\n"
    code += "pathlib.Path(sys.argv[1]).write_text(str(p.pid)); p.wait()"
    assert run_child([sys.executable, "-S", "-c", code, str(tmp_path / "pid")], 1.5, {}) == "out of time"
    state = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_the_command_says_what_is_missing_and_runs_only_what_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = [fake("x"), fake("y", value=2)]
    arguments = ["--results", str(tmp_path), "--devices", "cpu", "--minutes", "1"]
    assert main([*arguments, "--dry-run"], known) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("y: no file; 3 of 3 rows missing")
    assert main([*arguments, "--only", "x"], known) == 0
    assert "x: all 3 rows are of today's kernels -- ended" in capsys.readouterr().out
    assert not (tmp_path / "y.json").exists()


class _ParsedError(Exception):
    pass


def _commands() -> list[list[str]]:
    """The arguments of each Python module that the catalogue runs, the module first."""
    folder = Path("/tmp/never-written")
    steps = [(each, Step(folder / each.file, "cuda:0", 300.0, each.rows)) for each in catalogue()]
    of_results = [each.command(step) for each, step in steps if each.name != "waiting"]
    builds = [list(command) for each in catalogue() for command in (*each.builds, *each.large_builds)]
    return [command[len(command) - command[::-1].index("-m") :] for command in of_results + builds]


@pytest.mark.parametrize("command", _commands(), ids=lambda command: " ".join(command)[:70])
def test_each_command_of_the_catalogue_is_understood(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_only(self: argparse.ArgumentParser, *arguments: Any) -> None:
        parse(self, *arguments)
        raise _ParsedError

    name, *arguments = command
    module = importlib.import_module(f"{name}.__main__" if name == "tests.gpu" else name)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(_ParsedError):
        module.main()


def test_the_configurations_of_waiting_times_are_requests(tmp_path: Path) -> None:
    (waiting,) = (each for each in catalogue() if each.name == "waiting")
    command = waiting.command(Step(tmp_path / "x.json", "cuda:0", 300.0, ("olmoe-1b-7b-6-layers-like",)))
    assert str(tmp_path / "waiting" / "olmoe-1b-7b-6-layers-like.yaml") in command and "--resume" in command
    assert all(parse_request(variant.document()) for variant in VARIANTS.values())


def test_the_catalogue_has_the_recorded_rows_of_each_file() -> None:
    folder = published_plans.PUBLISHED.parent / "results"
    names = {row["name"] for row in json.loads(published_plans.PUBLISHED.read_text())["rows"]}
    assert set(PUBLISHED) <= names
    states = {each.name: each.state(folder, folder / "none") for each in catalogue()}
    for name in ("moe-turns", "grouped-gemm", "launch-cost", "fused-choice", "waiting", "gpu-faults"):
        state = states[name]
        assert state.recorded is not None
        assert set(state.result.rows) & set(state.result.found(state.recorded)), name


IGNORES = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def test_a_child_that_ignores_an_interrupt_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "STOP_SECONDS", 0.2)
    started = time.monotonic()
    assert run_child([sys.executable, "-S", "-c", IGNORES], 0.5, {}) == "out of time"
    assert time.monotonic() - started < 5.0


def test_being_told_to_end_ends_all_children_and_says_what_there_is(tmp_path: Path) -> None:
    """The command runs in a process of its own, with two lanes, each of which has a second result to go on with."""
    code = f"""
import sys
from benchmarks.refresh import run
from benchmarks.refresh.__main__ import end_as_if_interrupted, main
from tests.benchmarks.test_refresh import IGNORES, fake
run.STOP_SECONDS = 0.3
end_as_if_interrupted()
folder = {str(tmp_path)!r}
noted = f"import os; open({{folder + '/pids'!r}}, 'a').write(str(os.getpid()) + chr(10)); " + IGNORES
known = [fake(name, command=lambda step: [sys.executable, "-S", "-c", noted], row_seconds=20) for name in "abcd"]
sys.exit(main(["--results", folder + "/results", "--devices", "cpu,cpu", "--minutes", "2"], known))
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        pids = tmp_path / "pids"
        end = time.monotonic() + 60
        while not (pids.exists() and len(pids.read_text().splitlines()) == 2) and time.monotonic() < end:
            time.sleep(0.02)
        child.send_signal(signal.SIGTERM)
        said, _ = child.communicate(timeout=30)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 130
    assert said.count(" -- stopped") == 2
    started = pids.read_text().splitlines()
    assert len(started) == 2, "nothing else begins"
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)


def test_a_whole_draft_of_a_run_that_was_killed_takes_its_place(
    tmp_path: Path, refresh: Callable[..., Refresh]
) -> None:
    _write(tmp_path, "x", "abc", "old")
    _write(tmp_path / "drafts", "x", "abc")
    assert "in a draft" in str(fake("x").state(tmp_path, tmp_path / "drafts"))
    refresh().run([fake("x")])
    assert _read(tmp_path, "x")["kernels"] == kernels_digest()


def test_a_torn_line_of_a_draft_costs_that_line_alone(tmp_path: Path, refresh: Callable[..., Refresh]) -> None:
    drafts = tmp_path / "drafts"
    drafts.mkdir()
    (drafts / "x.jsonl").write_text('{"row": "a"}\n{"row": "b"}\n{"ro')
    code = "import sys; open(sys.argv[1], 'a').write(chr(10).join(sys.argv[2:]) + chr(10))"

    def command(step: Step) -> list[str]:
        lines = [json.dumps({"row": row}) for row in step.missing]
        return [sys.executable, "-S", "-c", code, str(step.out), *lines]

    lines = fake("x", file="x.jsonl", found=lambda found: [each["row"] for each in found["lines"]], of_kernels=False)
    refresh().run([replace(lines, command=command)])
    assert [json.loads(line)["row"] for line in (tmp_path / "x.jsonl").read_text().splitlines()] == [*ROWS]


def test_a_file_of_another_form_has_no_rows_and_ends_nothing(tmp_path: Path, refresh: Callable[..., Refresh]) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"kernels": kernels_digest(), "other": 1}))
    run = refresh()
    run.run([fake("y")])
    assert fake("x").state(tmp_path, tmp_path / "drafts").missing == ROWS
    assert run.notes == {"y": "ended"}


def test_devices_count_among_those_that_the_process_sees(
    tmp_path: Path, refresh: Callable[..., Refresh], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    run = Refresh(tmp_path / "new" / "results", tmp_path / "elsewhere", time.monotonic() + 30, ["cuda:1"])
    run.run([fake("x")])
    assert _read(tmp_path / "new" / "results", "x")["device"] == "6"
