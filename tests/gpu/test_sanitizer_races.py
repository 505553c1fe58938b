"""What the compute-sanitizer runner makes of racecheck's hazards."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu import sanitizer
from tests.gpu.sanitizer_races import hazards, num_of_warp_specialize, only_of_warp_specialize

ROWS = Path(__file__).parents[2] / "bexp/kernels/experts/hopper_grouped/rows_kernel.py"
BASE = 0x324D0


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(ROWS.read_text().splitlines(), 1) if line.startswith(text))


DEF, CALL = line_of("def rows_kernel"), line_of("    if CONSUMERS == 1")


def hazard(
    *, address: int = BASE, write: int = CALL, read: int = DEF, writer: int = 31, reader: int = 128, offset: int = 0x120
) -> str:
    return (
        f"========= Error: Potential RAW hazard detected at __shared__ {address:#x} in block (26,0,0) :\n"
        f"=========     Write Thread ({writer},0,0) at rows_kernel+0x3060 in rows_kernel.py:{write}\n"
        f"=========     Read Thread ({reader},0,0) at rows_kernel+{offset:#x} in rows_kernel.py:{read}\n"
        "=========     Current Value : 3\n========= \n"
    )


STATES = "".join(hazard(address=BASE + worker, reader=128 + 32 * worker) for worker in range(4))
"""What each of four worker warps reads."""


def output(text: str, displayed: int | None = None) -> str:
    count = displayed or text.count("detected")
    return f"case hopper\n{text}========= RACECHECK SUMMARY: {count} hazards displayed ({count} errors, 0 warnings)\n"


def test_a_byte_for_each_worker_warp_is_not_ours() -> None:
    found = hazards(output(STATES))
    assert [(each.case, each.first_byte, len(each.accesses)) for each in found] == [("hopper", BASE, 2)] * 4
    assert num_of_warp_specialize(found) == 4
    assert only_of_warp_specialize(output(STATES))
    assert only_of_warp_specialize(output(STATES + hazard(address=0x900, write=DEF, offset=0x240))), "another variant"
    assert not only_of_warp_specialize(output(STATES, displayed=5)), "a hazard was not read"


OURS = {
    "in a partition": hazard(write=line_of("def _multiply")),
    "at our barriers": hazard(read=line_of("    full = make_barriers")),
    "another byte": hazard(address=BASE + 4),
    "not a warp's first thread": hazard(address=BASE + 1, reader=130),
    "read by the first partition": hazard(reader=96),
    "written by a worker": hazard(writer=160),
    "two writes": hazard().replace("Read Thread", "Write Thread"),
    "no place": hazard().replace(f" in rows_kernel.py:{DEF}", ""),
    "no address": hazard().replace(f"__shared__ {BASE:#x}", "Unknown address"),
}


@pytest.mark.parametrize("ours", OURS.values(), ids=OURS)
def test_anything_else_is_ours(ours: str) -> None:
    assert not only_of_warp_specialize(output(STATES + ours))
    assert not only_of_warp_specialize(output(ours + STATES))


@pytest.mark.parametrize(
    ("more", "status", "said"),
    [("", 0, "clean in 0 s, 4 hazards"), (hazard(reader=96), 1, "errors in 0 s, 0 hazards")],
    ids=["Triton's", "ours"],
)
def test_the_command_counts_the_hazards_of_warp_specialize(
    more: str,
    status: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tool = tmp_path / "compute-sanitizer"
    is_asked = "[[ \"$*\" == *'--racecheck-report hazard'* ]] || exit 3"
    tool.write_text(f"#!/bin/bash\n{is_asked}\ncat <<X\n{output(STATES + more)}X\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setattr(sanitizer, "find_sanitizer", lambda: str(tool))
    monkeypatch.setattr(sanitizer, "run_here", lambda cases: 0)
    assert sanitizer.main(["--tools", "racecheck", "--cases", "router"]) == status
    assert f"racecheck: {said} of warp_specialize" in capsys.readouterr().out
