"""What the compute-sanitizer runner makes of racecheck's reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu import sanitizer
from tests.gpu.sanitizer_races import only_of_warp_specialize, races

ROOT = Path(__file__).parents[2]
CONTROL = ROOT / "tests/gpu/warp_specialize_control.py"
ROWS = ROOT / "bexp/kernels/experts/hopper/rows_kernel.py"


def line_of(path: Path, text: str) -> int:
    return next(number for number, line in enumerate(path.read_text().splitlines(), 1) if line.startswith(text))


def report(path: Path, kernel: str, *lines: int) -> str:
    places = [f"Access at {kernel}+0x{16 * line:x} in {path.name}:{line}".replace("Access", "access") for line in lines]
    others = "".join(f"=========     and Write {place} [65 hazards]\n" for place in places[1:])
    return f"========= Error: Race reported between Read {places[0]}\n{others}========= \n"


def output(*reports: tuple[str, str], displayed: int | None = None) -> str:
    said = "".join(f"case {case}\n{text}" for case, text in reports)
    return f"{said}========= RACECHECK SUMMARY: {displayed or len(reports)} hazards displayed (0 errors, 0 warnings)\n"


@pytest.fixture
def control() -> tuple[str, str]:
    lines = line_of(CONTROL, "def control_kernel"), line_of(CONTROL, "    if WORKERS == 1")
    return "control", report(CONTROL, "control_kernel", lines[0], *lines)


def test_reports_at_the_places_of_warp_specialize_are_not_ours(control: tuple[str, str]) -> None:
    start, call = line_of(ROWS, "def rows_kernel"), line_of(ROWS, "    if CONSUMERS == 1")
    ours = "hopper", report(ROWS, "rows_kernel", start, start, call)
    assert [(race.case, len(race.accesses)) for race in races(output(control, ours))] == [("control", 3), ("hopper", 3)]
    assert only_of_warp_specialize(output(control, ours), "control")
    assert not only_of_warp_specialize(output(ours), "control"), "the control kernel did not show it"
    assert not only_of_warp_specialize(output(control, ours, displayed=3), "control"), "a report was not read"


@pytest.mark.parametrize("place", ["def _multiply", "def _load", "    full = make_barriers"])
def test_a_report_elsewhere_is_ours(place: str, control: tuple[str, str]) -> None:
    ours = "hopper", report(ROWS, "rows_kernel", line_of(ROWS, "def rows_kernel"), line_of(ROWS, place))
    assert not only_of_warp_specialize(output(control, ours), "control")


def test_a_report_without_a_place_is_ours(control: tuple[str, str]) -> None:
    text = "========= Error: Race reported between Read access at rows_kernel+0x120\n"
    assert not only_of_warp_specialize(output(control, ("hopper", text)), "control")


def test_the_command_adds_the_control_and_counts_its_reports(
    control: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = output((sanitizer.CONTROL, control[1]))
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/bash\n[[ \"$*\" == *'{sanitizer.CONTROL}'* ]] || exit 3\ncat <<X\n{said}X\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setattr(sanitizer, "find_sanitizer", lambda: str(tool))
    monkeypatch.setattr(sanitizer, "run_here", lambda cases: 0)
    assert sanitizer.main(["--tools", "racecheck", "--cases", "router"]) == 0
    assert "racecheck: clean" in (printed := capsys.readouterr().out)
    assert "1 reports of warp_specialize" in printed
